// How long each GPU kernel takes at training sizes, and how close it comes to what this GPU can do.
// Built only with CUDA.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace muster::cuda {

struct GpuBenchOptions {
  int runs = 11;       // timed, after two to warm up
  std::string filter;  // only kernels whose name contains this
};

struct GpuBenchRow {
  std::string kernel;
  std::string shape;
  double median_ms = 0.0;
  // GB/s where memory bounds the kernel (every input read once, every result written once), else
  // TFLOP/s; and that as a part of the ceiling below.
  double rate = 0.0;
  bool memory_bound = false;
  double percent = 0.0;
};

struct GpuBenchReport {
  std::string gpu;
  // Measured in the same run: a device-to-device copy of 4 GiB (bytes read plus bytes written) and
  // an 8192³ bf16 product of random numbers.
  double copy_gb_per_s = 0.0;
  double matmul_tflop_per_s = 0.0;
  std::vector<GpuBenchRow> rows;
};

// Medians of runs on cold caches (the L2 cache is flushed before each). `on_row`, if any, is called
// as soon as a kernel is done. Throws CudaError where there is no GPU.
GpuBenchReport bench_gpu(const GpuBenchOptions& options,
                         const std::function<void(const GpuBenchRow&)>& on_row = {});

// One line of the table that a terminal gets.
std::string gpu_bench_line(const GpuBenchRow& row);

}  // namespace muster::cuda
