// `muster bench kernels`: how long each CPU kernel takes, and how close it comes to what this
// machine can do.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace muster {

struct KernelBenchOptions {
  // Shapes of one block: activations [tokens, dim], `heads` query and `kv_heads` key heads of
  // head_dim, attention over segments of `segment` tokens.
  int64_t tokens = 2048;
  int64_t dim = 768;
  int64_t heads = 12;
  int64_t kv_heads = 4;
  int64_t head_dim = 64;
  int64_t segment = 1024;
  int64_t ffn = 2048;
  int64_t vocab = 4096;
  int64_t parameters = 4 << 20;  // of the flat shard that optimizer and norm work on
  double seconds = 0.3;          // time for each kernel's runs; three runs at least
  int64_t flush_bytes = 0;       // written before each run; 0: twice the last-level cache
  std::string filter;            // only kernels whose name contains this
};

struct KernelBenchRow {
  std::string kernel;
  std::string shape;
  int64_t runs = 0;
  double median_s = 0.0;
  // GB/s where memory bounds the kernel (every input read once, every result written once), else
  // GFLOP/s; and that as a part of the ceiling below. More than 100% is possible where a result
  // stays in the last-level cache or overwrites an input.
  double rate = 0.0;
  bool memory_bound = false;
  double percent = 0.0;
};

struct KernelBenchReport {
  std::string machine;  // the processor's name
  int threads = 0;
  // The ceilings, measured with the same threads in the same run: a copy of large buffers (bytes
  // read plus bytes written) and independent fused multiply-adds in registers.
  double copy_gb_per_s = 0.0;
  double fma_gflop_per_s = 0.0;
  std::vector<KernelBenchRow> rows;
};

// Runs every kernel warm but with its data flushed from the caches, and takes the median.
// `on_row`, if any, is called as soon as a kernel is done.
KernelBenchReport bench_kernels(const KernelBenchOptions& options,
                                const std::function<void(const KernelBenchRow&)>& on_row = {});

}  // namespace muster
