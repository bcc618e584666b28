#include "common/config/fields.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <limits>

namespace muster {
namespace {

constexpr double kUnbounded = std::numeric_limits<double>::infinity();
// Large enough for any model that will be trained, small enough that no product of three overflows.
constexpr double kMaxSize = 1 << 20;
constexpr double kMaxSteps = 1e12;
constexpr double kMaxWorkers = 1 << 16;

struct Limits {
  double min;
  double max;
};

// Collects the fields of one section; `Section` is the section's struct.
template <typename Section>
class SectionBuilder {
 public:
  SectionBuilder(std::vector<ConfigField>& fields, std::string name, Section Config::*section)
      : fields_(fields), name_(std::move(name)), section_(section) {}

  template <typename T>
  SectionBuilder& number(const char* name, T Section::*member, Limits limits, const char* unit,
                         const char* doc) {
    fields_.push_back({name_, name, slot_of(member), limits.min, limits.max, {}, unit, doc});
    return *this;
  }
  SectionBuilder& flag(const char* name, bool Section::*member, const char* doc) {
    fields_.push_back({name_, name, slot_of(member), 0, 0, {}, "", doc});
    return *this;
  }
  SectionBuilder& text(const char* name, std::string Section::*member, const char* doc) {
    return choice(name, member, {}, doc);
  }
  SectionBuilder& choice(const char* name, std::string Section::*member,
                         std::vector<std::string> choices, const char* doc) {
    fields_.push_back({name_, name, slot_of(member), 0, 0, std::move(choices), "", doc});
    return *this;
  }
  SectionBuilder& list(const char* name, std::vector<std::string> Section::*member,
                       const char* doc) {
    fields_.push_back({name_, name, slot_of(member), 0, 0, {}, "", doc});
    return *this;
  }

 private:
  template <typename T>
  std::function<ConfigSlot(Config&)> slot_of(T Section::*member) const {
    return [section = section_, member](Config& config) -> ConfigSlot {
      return &(config.*section.*member);
    };
  }

  std::vector<ConfigField>& fields_;
  std::string name_;
  Section Config::*section_;
};

void add_run(std::vector<ConfigField>& fields) {
  SectionBuilder<RunConfig>(fields, "run", &Config::run)
      .text("name", &RunConfig::name, "name of the run")
      .text("dir", &RunConfig::dir, "run directory; \"\": runs/NAME under the current folder")
      .number("seed", &RunConfig::seed, {0, kUnbounded}, "",
              "seed of initialisation, sample order and sampling")
      .choice("device", &RunConfig::device, {"auto", "cpu", "cuda"},
              "where workers compute; auto: on GPUs, one worker each, where there are any")
      .flag(
          "deterministic", &RunConfig::deterministic,
          "GPUs: two runs with the same number of workers are bitwise equal, somewhat slower; CPUs "
          "always are")
      .choice("resume", &RunConfig::resume, {"auto", "never", "must"},
              "auto: from the newest whole checkpoint, if any; never: refuse a used directory");
}

void add_model(std::vector<ConfigField>& fields) {
  SectionBuilder<ModelConfig>(fields, "model", &Config::model)
      .choice("family", &ModelConfig::family, {"llama", "gpt2"}, "architecture")
      .number("vocab_size", &ModelConfig::vocab_size, {0, 1 << 24}, "tokens",
              "rows of the embedding; 0: the tokenizer's vocabulary")
      .number("width", &ModelConfig::width, {1, kMaxSize}, "", "size of the residual stream")
      .number("layers", &ModelConfig::layers, {1, 1 << 14}, "", "transformer blocks")
      .number("heads", &ModelConfig::heads, {1, 1 << 14}, "", "query heads")
      .number("kv_heads", &ModelConfig::kv_heads, {0, 1 << 14}, "",
              "key and value heads; must divide heads; 0: as many as heads")
      .number("head_dim", &ModelConfig::head_dim, {0, 1 << 14}, "",
              "size of a head; 0: width / heads")
      .number("ffn", &ModelConfig::ffn, {0, kMaxSize}, "",
              "hidden size of the MLP; 0: llama 8/3 width rounded up to 32, gpt2 4 width")
      .number("norm_eps", &ModelConfig::norm_eps, {1e-12, 1}, "", "epsilon of the norms")
      .flag("tie_embeddings", &ModelConfig::tie_embeddings, "head and embedding share weights")
      .flag("qkv_bias", &ModelConfig::qkv_bias,
            "biases on the q, k and v projections (gpt2 always has them)")
      .flag("qk_norm", &ModelConfig::qk_norm, "RMSNorm over each head of q and k")
      .flag("causal", &ModelConfig::causal, "attend to earlier positions only")
      .number("rope_theta", &ModelConfig::rope_theta, {1, 1e12}, "", "base of rotary positions")
      .choice("rope_scaling", &ModelConfig::rope_scaling, {"none", "linear", "llama3"},
              "stretching of rotary positions")
      .number("rope_factor", &ModelConfig::rope_factor, {1, 1e6}, "", "how far they are stretched")
      .number("rope_low_freq_factor", &ModelConfig::rope_low_freq_factor, {1e-6, 1e6}, "",
              "llama3 scaling: longest unscaled wavelength is original positions over this")
      .number("rope_high_freq_factor", &ModelConfig::rope_high_freq_factor, {1e-6, 1e6}, "",
              "llama3 scaling: wavelengths below original positions over this stay")
      .number("rope_original_positions", &ModelConfig::rope_original_positions, {1, 1 << 30},
              "tokens", "llama3 scaling: context length before stretching")
      .number("max_positions", &ModelConfig::max_positions, {0, 1 << 30}, "tokens",
              "gpt2's learned positions; 0: train.sequence_length")
      .number("init_std", &ModelConfig::init_std, {0, 10}, "",
              "standard deviation of the initial weights");
}

void add_data(std::vector<ConfigField>& fields) {
  SectionBuilder<DataConfig>(fields, "data", &Config::data)
      .list("sources", &DataConfig::sources,
            "files, folders (walked) and globs; relative to the config file")
      .choice("tokenizer", &DataConfig::tokenizer, {"bytes"}, "how text becomes tokens")
      .number("held_out", &DataConfig::held_out, {0, 0.9}, "", "share of documents for evaluation")
      .flag("separate_documents", &DataConfig::separate_documents,
            "attention and targets stop at document boundaries")
      .flag("shuffle", &DataConfig::shuffle, "visit the samples of an epoch in random order")
      .text("cache_dir", &DataConfig::cache_dir,
            "document indexes; \"\": $XDG_CACHE_HOME/muster or ~/.cache/muster")
      .number("cache_mib", &DataConfig::cache_mib, {1, 1 << 24}, "MiB",
              "decoded text a data service keeps in memory")
      .number("prefetch", &DataConfig::prefetch, {1, 1024}, "micro-batches",
              "batches ready ahead, per worker")
      .number("threads", &DataConfig::threads, {0, 4096}, "",
              "decoding threads of a data service; 0: found from the machine");
}

void add_train(std::vector<ConfigField>& fields) {
  SectionBuilder<TrainConfig>(fields, "train", &Config::train)
      .number("steps", &TrainConfig::steps, {1, kMaxSteps}, "steps", "length of the run")
      .number("global_batch", &TrainConfig::global_batch, {1, kMaxSize}, "samples",
              "samples a step, over all workers")
      .number("micro_batch", &TrainConfig::micro_batch, {1, kMaxSize}, "samples",
              "samples a forward pass of one worker")
      .number("sequence_length", &TrainConfig::sequence_length, {1, 1 << 24}, "tokens",
              "tokens a sample")
      .number("eval_every", &TrainConfig::eval_every, {0, kMaxSteps}, "steps",
              "held-out evaluation; 0: never")
      .number("eval_samples", &TrainConfig::eval_samples, {1, kMaxSize}, "samples",
              "held-out samples an evaluation")
      .number("spike_factor", &TrainConfig::spike_factor, {0, 1e6}, "",
              "skip an update whose loss exceeds this times the running mean; 0: off")
      .number("max_skips", &TrainConfig::max_skips, {1, 1e9}, "updates",
              "stop after this many skipped updates in a row");
}

void add_optimizer(std::vector<ConfigField>& fields) {
  SectionBuilder<OptimizerConfig>(fields, "optimizer", &Config::optimizer)
      .number("lr", &OptimizerConfig::lr, {0, 100}, "", "peak learning rate")
      .number("beta1", &OptimizerConfig::beta1, {0, 0.999999}, "", "AdamW's decay of the mean")
      .number("beta2", &OptimizerConfig::beta2, {0, 0.99999999}, "", "AdamW's decay of the square")
      .number("eps", &OptimizerConfig::eps, {1e-20, 1}, "", "AdamW's epsilon")
      .number("weight_decay", &OptimizerConfig::weight_decay, {0, 10}, "",
              "on matrices; never on norms, biases and one-dimensional parameters")
      .number("clip_norm", &OptimizerConfig::clip_norm, {0, 1e9}, "",
              "largest norm of the gradient; 0: off");
}

void add_schedule(std::vector<ConfigField>& fields) {
  SectionBuilder<ScheduleConfig>(fields, "schedule", &Config::schedule)
      .choice("type", &ScheduleConfig::type, {"cosine", "wsd", "linear", "constant"},
              "shape of the learning rate after warm-up")
      .number("warmup_steps", &ScheduleConfig::warmup_steps, {0, kMaxSteps}, "steps",
              "linear rise from 0 to optimizer.lr")
      .number("decay_steps", &ScheduleConfig::decay_steps, {0, kMaxSteps}, "steps",
              "wsd: length of the final decay; 0: a tenth of the run")
      .number("min_lr_ratio", &ScheduleConfig::min_lr_ratio, {0, 1}, "",
              "share of optimizer.lr left at the end");
}

void add_parallel(std::vector<ConfigField>& fields) {
  SectionBuilder<ParallelConfig>(fields, "parallel", &Config::parallel)
      .number("workers", &ParallelConfig::workers, {0, kMaxWorkers}, "",
              "worker processes; 0: one per GPU, or per two CPU cores where there is none")
      .choice("shard", &ParallelConfig::shard, {"full", "grad", "optimizer", "none"},
              "what is sharded over the workers; full: weights, gradients and optimizer state")
      .number("shard_group", &ParallelConfig::shard_group, {0, kMaxWorkers}, "workers",
              "workers that share one copy of what is sharded, typically those of a node; the "
              "groups are replicas; 0: all workers; else it must divide their number")
      .flag("reshard_after_forward", &ParallelConfig::reshard_after_forward,
            "shard = full: weights are gathered again for backward; false: kept, as with grad")
      .choice("reduce_dtype", &ParallelConfig::reduce_dtype, {"float32", "bfloat16"},
              "type in which gradients travel; bfloat16 needs GPUs")
      .choice("backend", &ParallelConfig::backend, {"auto", "gloo", "nccl", "single"},
              "collectives; auto: nccl on GPUs, gloo on CPUs; single: one worker, none needed")
      .number("prefetch_units", &ParallelConfig::prefetch_units, {0, 64}, "units",
              "blocks gathered ahead of their use")
      .text("interface", &ParallelConfig::interface,
            "network interface of the data plane; \"\": by the route to the coordinator")
      .number("threads", &ParallelConfig::threads, {0, 4096}, "",
              "compute threads a worker; 0: the node's cores / its workers");
}

void add_rest(std::vector<ConfigField>& fields) {
  SectionBuilder<MemoryConfig>(fields, "memory", &Config::memory)
      .choice("checkpoint", &MemoryConfig::checkpoint, {"none", "block", "selective", "every:N"},
              "blocks recomputed in backward to save memory; selective: but for their attention; "
              "every:N: kept is each N-th block's input");
  SectionBuilder<ElasticConfig>(fields, "elastic", &Config::elastic)
      .number("min_workers", &ElasticConfig::min_workers, {1, kMaxWorkers}, "",
              "with fewer the run waits, its state saved")
      .number("max_workers", &ElasticConfig::max_workers, {0, kMaxWorkers}, "",
              "more stand by; 0: as many as the batch has samples")
      .number("wait_timeout_s", &ElasticConfig::wait_timeout_s, {0, 1e6}, "s",
              "below min_workers: until the run stops, resumably; 0: at once")
      .number("join_window_s", &ElasticConfig::join_window_s, {0, 1e4}, "s",
              "workers that join within it are taken in together")
      .number("mirror_every", &ElasticConfig::mirror_every, {-1, 1e6}, "steps",
              "between copies of each worker's state in a peer's memory; 0: none, -1: as often as "
              "slows training by less than 2%")
      .number("restarts", &ElasticConfig::restarts, {0, 1e6}, "",
              "of crashed processes of a node within restart_window_s; 0: none")
      .number("restart_window_s", &ElasticConfig::restart_window_s, {0.1, 1e6}, "s",
              "in which a node's restarts are counted")
      .number("cool_down_s", &ElasticConfig::cool_down_s, {0, 1e6}, "s",
              "a node that used up its restarts starts nothing for this long")
      .number("straggler_factor", &ElasticConfig::straggler_factor, {0, 1e6}, "",
              "a worker that computes this times as long as the others' median is named; 0: none")
      .number("straggler_steps", &ElasticConfig::straggler_steps, {1, 1e9}, "steps",
              "in a row that it must be that slow for")
      .flag("straggler_drain", &ElasticConfig::straggler_drain,
            "such a worker is asked to leave, where others remain")
      .number("coordinator_timeout_s", &ElasticConfig::coordinator_timeout_s, {0.1, 1e6}, "s",
              "members wait for a coordinator that is gone to be started anew")
      .number("heartbeat_s", &ElasticConfig::heartbeat_s, {0.01, 60}, "s",
              "interval of heartbeats; five missed ones end a member")
      .number("join_timeout_s", &ElasticConfig::join_timeout_s, {0.1, 1e6}, "s",
              "for all workers to arrive")
      .number("collective_timeout_s", &ElasticConfig::collective_timeout_s, {0.1, 1e6}, "s",
              "for one collective operation")
      .number("shutdown_timeout_s", &ElasticConfig::shutdown_timeout_s, {0.1, 1e6}, "s",
              "from being asked to go until being killed");
  SectionBuilder<CheckpointConfig>(fields, "checkpoint", &Config::checkpoint)
      .number("every", &CheckpointConfig::every, {0, kMaxSteps}, "steps", "0: only at the end")
      .number("keep", &CheckpointConfig::keep, {0, 1e9}, "", "newest ones kept; 0: all");
  SectionBuilder<MetricsConfig>(fields, "metrics", &Config::metrics)
      .flag("debug_samples", &MetricsConfig::debug_samples,
            "write samples.jsonl: the sample ids of every committed step");
  SectionBuilder<PrecisionConfig>(fields, "precision", &Config::precision)
      .choice("compute", &PrecisionConfig::compute, {"auto", "float32", "bfloat16"},
              "type of activations; auto: bfloat16 on GPUs; master weights are always float32")
      .choice("matmul", &PrecisionConfig::matmul, {"auto", "fp8"},
              "type of the blocks' matrix products; fp8: scaled per tensor, on Hopper and newer")
      .choice("moments", &PrecisionConfig::moments, {"float32", "bfloat16"},
              "type of AdamW's moments; bfloat16: rounded stochastically, on GPUs");
}

// N of "every:N" where `value` is "every:4"; 0 when it is no such thing.
int64_t counted_choice(const std::string& choice, const std::string& value) {
  const std::string prefix = choice.substr(0, choice.size() - 1);
  if (!choice.ends_with(":N") || !value.starts_with(prefix)) return 0;
  const std::string digits = value.substr(prefix.size());
  constexpr size_t kMaxDigits = 9;
  const bool is_number = !digits.empty() && digits.size() <= kMaxDigits &&
                         std::all_of(digits.begin(), digits.end(),
                                     [](unsigned char c) { return std::isdigit(c) != 0; });
  return is_number ? std::stoll(digits) : 0;
}

}  // namespace

const std::vector<ConfigField>& config_fields() {
  static const std::vector<ConfigField> all_fields = [] {
    std::vector<ConfigField> fields;
    add_run(fields);
    add_model(fields);
    add_data(fields);
    add_train(fields);
    add_optimizer(fields);
    add_schedule(fields);
    add_parallel(fields);
    add_rest(fields);
    return fields;
  }();
  return all_fields;
}

const ConfigField* find_config_field(std::string_view section, std::string_view name) {
  for (const ConfigField& field : config_fields()) {
    if (field.section == section && field.name == name) return &field;
  }
  return nullptr;
}

bool is_choice(const ConfigField& field, const std::string& value) {
  return field.choices.empty() ||
         std::any_of(field.choices.begin(), field.choices.end(), [&](const std::string& choice) {
           return choice == value ? !choice.ends_with(":N") : counted_choice(choice, value) > 0;
         });
}

std::string allowed_values(const ConfigField& field) {
  if (!field.choices.empty()) return fmt::format("{}", fmt::join(field.choices, " | "));
  if (field.min == 0 && field.max == 0) return "";
  if (field.max == kUnbounded) return fmt::format("{:.12g} or more", field.min);
  return fmt::format("{:.12g} to {:.12g}", field.min, field.max);
}

}  // namespace muster
