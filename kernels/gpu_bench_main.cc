// muster_gpu_bench [FILTER]: the GPU kernels' speed at training sizes, as a table.
#include <cstdio>
#include <exception>

#include "kernels/cuda/gpu_bench.h"

int main(int argc, char** argv) {
  using namespace muster::cuda;
  GpuBenchOptions options;
  if (argc > 1) options.filter = argv[1];
  try {
    const GpuBenchReport report = bench_gpu(options, [](const GpuBenchRow& row) {
      std::printf("%s\n", gpu_bench_line(row).c_str());
      std::fflush(stdout);
    });
    std::printf("%s; ceilings: copy %.0f GB/s, 8192^3 bf16 product %.0f TFLOP/s\n",
                report.gpu.c_str(), report.copy_gb_per_s, report.matmul_tflop_per_s);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "muster_gpu_bench: %s\n", error.what());
    return 1;
  }
  return 0;
}
