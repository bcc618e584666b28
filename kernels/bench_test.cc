#include "kernels/bench.h"

#include <gtest/gtest.h>

#include <set>

namespace muster {
namespace {

// Shapes so small that a test can afford every kernel.
KernelBenchOptions small_options() {
  KernelBenchOptions options;
  options.tokens = 16;
  options.dim = 24;
  options.heads = 4;
  options.kv_heads = 2;
  options.head_dim = 8;
  options.segment = 8;
  options.ffn = 40;
  options.vocab = 50;
  options.parameters = 1000;
  options.seconds = 0.0;
  options.flush_bytes = 1 << 16;
  return options;
}

TEST(KernelBenchTest, RunsEveryKernelAndReportsEachOnce) {
  std::vector<std::string> seen;
  const KernelBenchReport report = bench_kernels(
      small_options(), [&](const KernelBenchRow& row) { seen.push_back(row.kernel); });
  EXPECT_GT(report.copy_gb_per_s, 0.0);
  EXPECT_GT(report.fma_gflop_per_s, 0.0);
  EXPECT_GE(report.threads, 1);
  ASSERT_EQ(seen.size(), report.rows.size());
  std::set<std::string> kernels;
  for (const KernelBenchRow& row : report.rows) {
    EXPECT_GE(row.runs, 3) << row.kernel;
    EXPECT_GT(row.median_s, 0.0) << row.kernel;
    EXPECT_GT(row.rate, 0.0) << row.kernel;
    const double ceiling = row.memory_bound ? report.copy_gb_per_s : report.fma_gflop_per_s;
    EXPECT_NEAR(row.percent, 100.0 * row.rate / ceiling, 1e-9 * row.percent) << row.kernel;
    EXPECT_TRUE(kernels.insert(row.kernel + row.shape).second) << row.kernel;
  }
  for (const char* kernel :
       {"embedding_backward", "rmsnorm_forward", "layernorm_backward", "rope_apply",
        "swiglu_backward", "gelu_forward", "adamw_step", "sum_of_squares", "linear_backward",
        "attention_backward", "linear_cross_entropy_train"}) {
    EXPECT_TRUE(std::count(seen.begin(), seen.end(), kernel) > 0) << kernel;
  }
}

TEST(KernelBenchTest, FilterPicksByName) {
  KernelBenchOptions options = small_options();
  options.filter = "norm_back";
  const KernelBenchReport report = bench_kernels(options);
  ASSERT_EQ(report.rows.size(), 2u);
  EXPECT_EQ(report.rows[0].kernel, "rmsnorm_backward");
  EXPECT_EQ(report.rows[1].kernel, "layernorm_backward");
}

}  // namespace
}  // namespace muster
