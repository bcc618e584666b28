// The configuration of a run: one typed struct per section of the TOML file. Each struct owns its
// defaults; fields.cc gives every key its unit, range and one-line meaning, and parsing, printing
// and --help all read that one list.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace muster {

struct RunConfig {
  std::string name = "run";
  std::string dir;  // "" = runs/NAME
  uint64_t seed = 1;
  std::string device = "auto";  // auto | cpu | cuda
  bool deterministic = false;   // on GPUs; CPUs always are
  std::string resume =
      "auto";  // auto: newest whole checkpoint, if any | never: refuse a used directory | must
};

struct ModelConfig {
  std::string family = "llama";  // llama | gpt2
  int64_t vocab_size = 0;        // 0 = the tokenizer's
  int64_t width = 256;           // d_model
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t kv_heads = 0;  // 0 = heads
  int64_t head_dim = 0;  // 0 = width / heads
  int64_t ffn = 0;       // 0 = llama: 8/3 width rounded up to 32; gpt2: 4 width
  double norm_eps = 1e-5;
  bool tie_embeddings = true;
  bool qkv_bias = false;  // llama only; gpt2 always has biases
  bool qk_norm = false;   // RMSNorm over each head of q and k
  bool causal = true;
  double rope_theta = 10000.0;
  std::string rope_scaling = "none";  // none | linear | llama3
  double rope_factor = 1.0;
  double rope_low_freq_factor = 1.0;
  double rope_high_freq_factor = 4.0;
  int64_t rope_original_positions = 8192;
  int64_t max_positions = 0;  // gpt2's learned positions; 0 = train.sequence_length
  double init_std = 0.02;
};

struct DataConfig {
  std::vector<std::string>
      sources;  // files, folders (walked) and globs; relative to the config file
  std::string tokenizer = "bytes";
  double held_out = 0.01;          // share of documents kept for evaluation
  bool separate_documents = true;  // attention and targets stop at document boundaries
  bool shuffle = true;
  std::string cache_dir;    // "" = $XDG_CACHE_HOME/muster or ~/.cache/muster
  int64_t cache_mib = 256;  // decoded text kept in memory by a data service
  int64_t prefetch = 4;     // micro-batches ready ahead, per worker
  int64_t threads = 0;      // decoding threads; 0 = found from the machine
};

struct TrainConfig {
  int64_t steps = 1000;
  int64_t global_batch = 32;      // samples a step, over all workers
  int64_t micro_batch = 8;        // samples a forward pass
  int64_t sequence_length = 256;  // tokens a sample
  int64_t eval_every = 0;         // steps; 0 = never
  int64_t eval_samples = 64;
  double spike_factor =
      0.0;                // skip an update whose loss exceeds this times the running mean; 0 = off
  int64_t max_skips = 5;  // stop after this many skipped updates in a row
};

struct OptimizerConfig {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;  // on matrices; never on norms, biases and one-dimensional parameters
  double clip_norm = 1.0;     // 0 = off
};

struct ScheduleConfig {
  std::string type = "cosine";  // cosine | wsd | linear | constant
  int64_t warmup_steps = 100;
  int64_t decay_steps = 0;    // wsd: length of the final decay; 0 = a tenth of the run
  double min_lr_ratio = 0.1;  // of optimizer.lr, at the end
};

struct ParallelConfig {
  int64_t workers = 0;                // 0 = one per GPU, or per two CPU cores where there is none
  std::string shard = "full";         // full | grad | optimizer | none
  int64_t shard_group = 0;            // workers that share one copy of the state; 0 = all
  bool reshard_after_forward = true;  // of full: free weights between forward and backward
  std::string reduce_dtype = "float32";  // float32 | bfloat16: gradients on their way
  std::string backend = "auto";          // auto | gloo | nccl | single
  int64_t prefetch_units = 1;            // units gathered ahead of their use
  std::string
      interface;        // network interface of the data plane; "" = by the route to the coordinator
  int64_t threads = 0;  // compute threads a worker; 0 = cores / workers of the node
};

struct MemoryConfig {
  std::string checkpoint = "none";  // none | block | selective | every:N
};

struct ElasticConfig {
  int64_t min_workers = 1;        // with fewer the run waits
  int64_t max_workers = 0;        // more stand by; 0 = as many as the batch has samples
  double wait_timeout_s = 600.0;  // below min_workers: until the run stops, resumably; 0 = at once
  double join_window_s = 0.5;     // joins within it change the generation once
  int64_t mirror_every = -1;      // steps; 0 = off, -1 = as often as costs less than 2% of the time
  int64_t restarts = 3;  // of crashed processes of a node within restart_window_s; 0 = none
  double restart_window_s = 300.0;
  double cool_down_s = 60.0;      // a node with more crashes starts none for this long
  double straggler_factor = 2.0;  // slower than this times the others' median; 0 = never named
  int64_t straggler_steps = 20;   // in a row
  bool straggler_drain = false;   // asks them to leave
  double coordinator_timeout_s = 60.0;  // members go on without a coordinator for this long
  double heartbeat_s = 1.0;             // interval; five missed ones end a member
  double join_timeout_s = 120.0;        // for all workers to arrive
  double collective_timeout_s = 60.0;
  double shutdown_timeout_s = 10.0;
};

struct CheckpointConfig {
  int64_t every = 0;  // steps; 0 = only at the end
  int64_t keep = 3;   // newest ones kept; 0 = all
};

struct MetricsConfig {
  bool debug_samples = false;  // write samples.jsonl: the ids of every committed step
};

struct PrecisionConfig {
  std::string compute = "auto";     // auto | float32 | bfloat16
  std::string matmul = "auto";      // auto (as compute) | fp8
  std::string moments = "float32";  // float32 | bfloat16: AdamW's
};

struct Config {
  RunConfig run;
  ModelConfig model;
  DataConfig data;
  TrainConfig train;
  OptimizerConfig optimizer;
  ScheduleConfig schedule;
  ParallelConfig parallel;
  MemoryConfig memory;
  ElasticConfig elastic;
  CheckpointConfig checkpoint;
  MetricsConfig metrics;
  PrecisionConfig precision;
};

// Reads, overrides ("section.key=value"), checks. Relative paths in the file are taken from its
// folder. Throws ConfigError "FILE:LINE: …" naming the key and the nearest valid one.
Config load_config(const std::string& path, const std::vector<std::string>& overrides = {});
// The same from text; `origin` stands in for the file name in messages.
Config parse_config(const std::string& toml, const std::string& origin,
                    const std::vector<std::string>& overrides = {});
// Every key with its value, as TOML that parse_config reads back to an equal Config.
std::string to_toml(const Config& config);
// Every key: type, default, unit and range, meaning. For --help and the README.
std::string describe_config();

// How many of `workers` share one copy of the sharded state: all with parallel.shard_group = 0, one
// with shard = "none". Throws ConfigError naming both numbers when the workers do not fall into
// such groups.
int64_t shard_group_size(const ParallelConfig& parallel, int64_t workers);

// Fills in every 0 and "" that stands for "found from the rest" in [model], once the tokenizer's
// vocabulary is known. Throws ConfigError on an impossible shape.
ModelConfig resolve_model(const Config& config, int64_t tokenizer_vocab);

}  // namespace muster
