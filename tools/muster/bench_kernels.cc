#include <fmt/format.h>

#include "kernels/bench.h"
#include "tools/muster/bench.h"

namespace muster {

std::vector<BenchResult> bench_kernels() {
  const KernelBenchReport report = bench_kernels(KernelBenchOptions{});
  std::vector<BenchResult> results = {
      {"copy", report.copy_gb_per_s, "GB/s",
       fmt::format("{}, {} threads", report.machine, report.threads)},
      {"multiply-add", report.fma_gflop_per_s, "GFLOP/s", "in registers"}};
  for (const KernelBenchRow& row : report.rows) {
    results.push_back(
        {row.kernel + " " + row.shape, row.rate, row.memory_bound ? "GB/s" : "GFLOP/s",
         fmt::format("{:.0f} % of the ceiling, {:.3g} ms", row.percent, row.median_s * 1e3)});
  }
  return results;
}

}  // namespace muster
