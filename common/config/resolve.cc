#include "common/config/resolve.h"

#include <fmt/format.h>

#include "common/error.h"

namespace muster {
namespace {

template <typename... Args>
[[noreturn]] void fail(const ConfigPlace& place, const char* key, fmt::format_string<Args...> why,
                       Args&&... args) {
  throw ConfigError(place(key) + ": " + fmt::format(why, std::forward<Args>(args)...));
}

void check_positions(const ModelConfig& model, const ConfigPlace& place) {
  if (model.family == "llama") {
    if (model.head_dim % 2 != 0) {
      fail(place, "model.head_dim", "{} is odd: rotary positions turn pairs, make it even",
           model.head_dim);
    }
    if (model.rope_scaling == "llama3" &&
        model.rope_high_freq_factor <= model.rope_low_freq_factor) {
      fail(place, "model.rope_high_freq_factor", "{} must exceed rope_low_freq_factor = {}",
           model.rope_high_freq_factor, model.rope_low_freq_factor);
    }
    if (model.max_positions != 0) {
      fail(place, "model.max_positions", "only gpt2 has learned positions, remove the key");
    }
  } else if (model.rope_scaling != "none") {
    fail(place, "model.rope_scaling", "gpt2 has no rotary positions, use \"none\"");
  }
}

int64_t shard_group_size_at(const ParallelConfig& parallel, int64_t workers,
                            const ConfigPlace& place) {
  if (parallel.shard == "none") return 1;
  if (parallel.shard_group == 0) return workers;
  if (workers % parallel.shard_group != 0) {
    fail(place, "parallel.shard_group",
         "{} does not divide the number of workers, {}: use a divisor, such as the GPUs of a node, "
         "or 0 for one group of all",
         parallel.shard_group, workers);
  }
  return parallel.shard_group;
}

void check_workers(const Config& config, const ConfigPlace& place) {
  const ParallelConfig& parallel = config.parallel;
  if (parallel.workers > 0) shard_group_size_at(parallel, parallel.workers, place);
  if (parallel.backend == "single" && parallel.workers > 1) {
    fail(place, "parallel.backend",
         "\"single\" cannot connect parallel.workers = {}, use \"auto\" or \"gloo\"",
         parallel.workers);
  }
  if (parallel.workers > config.train.global_batch) {
    fail(place, "parallel.workers",
         "{} workers cannot share train.global_batch = {} samples, use at most as many workers",
         parallel.workers, config.train.global_batch);
  }
  const ElasticConfig& elastic = config.elastic;
  if (elastic.min_workers > config.train.global_batch) {
    fail(place, "elastic.min_workers",
         "{} workers cannot share train.global_batch = {} samples: no run would ever begin",
         elastic.min_workers, config.train.global_batch);
  }
  if (elastic.max_workers > 0 && elastic.max_workers < elastic.min_workers) {
    fail(place, "elastic.max_workers", "{} is fewer than elastic.min_workers = {}",
         elastic.max_workers, elastic.min_workers);
  }
}

// What only a GPU can do, where the config itself says that there is none. With run.device = "auto"
// the worker finds out.
void check_gpu_options(const Config& config, const ConfigPlace& place) {
  const bool float32 = config.precision.compute == "float32";
  if (config.precision.matmul == "fp8" && float32) {
    fail(place, "precision.matmul", "fp8 products need precision.compute = \"bfloat16\"");
  }
  if (config.run.device != "cpu") return;
  const auto refuse = [&](const char* key, const std::string& value, const char* instead) {
    fail(place, key, "\"{}\" needs a GPU and run.device is \"cpu\", use \"{}\"", value, instead);
  };
  if (config.precision.compute == "bfloat16") refuse("precision.compute", "bfloat16", "float32");
  if (config.precision.matmul == "fp8") refuse("precision.matmul", "fp8", "auto");
  if (config.precision.moments == "bfloat16") refuse("precision.moments", "bfloat16", "float32");
  if (config.parallel.reduce_dtype == "bfloat16") {
    refuse("parallel.reduce_dtype", "bfloat16", "float32");
  }
  if (config.parallel.backend == "nccl") refuse("parallel.backend", "nccl", "auto");
}

}  // namespace

void check_config(const Config& config, const ConfigPlace& place) {
  if (config.run.name.empty() || config.run.name.find('/') != std::string::npos ||
      config.run.name.front() == '.') {
    fail(place, "run.name", "\"{}\" must name a folder: not empty, no '/', no leading '.'",
         config.run.name);
  }
  check_gpu_options(config, place);
  for (const std::string& source : config.data.sources) {
    if (source.empty()) fail(place, "data.sources", "holds an empty path");
  }
  if (config.train.eval_every > 0 && config.data.held_out == 0) {
    fail(place, "train.eval_every", "nothing is held out to evaluate on, set data.held_out > 0");
  }
  const ScheduleConfig& schedule = config.schedule;
  if (schedule.type == "wsd" && schedule.warmup_steps + schedule.decay_steps > config.train.steps) {
    fail(place, "schedule.decay_steps",
         "warm-up ({} steps) and decay ({} steps) do not fit into train.steps = {}",
         schedule.warmup_steps, schedule.decay_steps, config.train.steps);
  }
  check_workers(config, place);
  resolve_model_at(config, 0, place);
}

ModelConfig resolve_model_at(const Config& config, int64_t tokenizer_vocab,
                             const ConfigPlace& place) {
  ModelConfig model = config.model;
  if (model.vocab_size == 0) {
    model.vocab_size = tokenizer_vocab;
  } else if (model.vocab_size < tokenizer_vocab) {
    fail(place, "model.vocab_size", "{} is less than the tokenizer's {} tokens", model.vocab_size,
         tokenizer_vocab);
  }
  if (model.kv_heads == 0) model.kv_heads = model.heads;
  if (model.heads % model.kv_heads != 0) {
    fail(place, "model.kv_heads", "{} does not divide model.heads = {}", model.kv_heads,
         model.heads);
  }
  if (model.head_dim == 0) {
    if (model.width % model.heads != 0) {
      fail(place, "model.heads",
           "{} does not divide model.width = {}, change one or set model.head_dim", model.heads,
           model.width);
    }
    model.head_dim = model.width / model.heads;
  }
  if (model.ffn == 0) {
    constexpr int64_t kFfnMultiple = 32;
    const int64_t two_thirds = (model.width * 8 + 2) / 3;
    model.ffn = model.family == "gpt2"
                    ? 4 * model.width
                    : (two_thirds + kFfnMultiple - 1) / kFfnMultiple * kFfnMultiple;
  }
  check_positions(model, place);
  if (model.family == "gpt2") {
    if (model.max_positions == 0) model.max_positions = config.train.sequence_length;
    if (model.max_positions < config.train.sequence_length) {
      fail(place, "model.max_positions", "{} is less than train.sequence_length = {}",
           model.max_positions, config.train.sequence_length);
    }
  }
  return model;
}

int64_t shard_group_size(const ParallelConfig& parallel, int64_t workers) {
  return shard_group_size_at(parallel, workers, [](const std::string& key) { return key; });
}

ModelConfig resolve_model(const Config& config, int64_t tokenizer_vocab) {
  return resolve_model_at(config, tokenizer_vocab, [](const std::string& key) { return key; });
}

}  // namespace muster
