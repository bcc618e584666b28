// Measuring for the kernel benchmark: timed runs on cold data, and the machine's ceilings.
#pragma once

#include <cstdint>
#include <functional>

#include "common/tensor.h"

namespace muster {

struct Timing {
  int64_t runs = 0;
  double median_s = 0.0;
  double fastest_s = 0.0;
};

// Writes a buffer larger than the last-level cache, so that nothing of a run's data stays in it.
class CacheFlusher {
 public:
  // 0 bytes: twice the last-level cache, and 64 MiB at least.
  explicit CacheFlusher(int64_t bytes = 0);
  void flush();

 private:
  Tensor buffer_;
};

// Two runs to warm up, then timed runs, each after a flush, for about `seconds` of running time
// (at least three runs, and never more than ten times `seconds` with the flushes).
Timing time_runs(CacheFlusher& flusher, double seconds, const std::function<void()>& run);

// The ceilings are those of the fastest run.
// Bytes read plus bytes written per second by all threads copying, in GB/s.
double measure_copy_gb_per_s(CacheFlusher& flusher, double seconds);
// Float32 operations per second of all threads, an addition and a multiplication each, in GFLOP/s.
double measure_fma_gflop_per_s(double seconds);

}  // namespace muster
