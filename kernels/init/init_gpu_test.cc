#include "kernels/cuda/gpu_testing.h"
#include "kernels/init/init.h"

namespace muster {
namespace {

using namespace testing;
using InitGpuTest = GpuTest;

void synchronize() {
  CUDA_CHECK(cudaStreamSynchronize(static_cast<cudaStream_t>(gpu_stream().handle)));
}

// To a unit in the last place of each number, and most of them to the bit.
TEST_F(InitGpuTest, NormalMatchesTheCpu) {
  const int64_t n = 100003;
  Operand out({n}, DType::kFloat32, {.offset = 3, .row_stride = 1});
  out.upload();
  fill_normal(gpu_stream(), out.device(), 11, 77, int64_t{1} << 33, 0.02);
  synchronize();
  fill_normal(Stream::cpu(), out.host(), 11, 77, int64_t{1} << 33, 0.02);
  const auto got = out.download();
  const auto want = out.host_values();
  int64_t different = 0;
  for (int64_t i = 0; i < n + 3; ++i) {
    if (!out.inside(i)) {
      ASSERT_TRUE(std::isnan(got[i]));
      continue;
    }
    ASSERT_LE(std::abs(got[i] - want[i]), 0x1p-23 * std::abs(want[i])) << i;
    different += got[i] != want[i];
  }
  EXPECT_LT(different, n / 1000);
}

TEST_F(InitGpuTest, FillsWithAValue) {
  const Operand out({1001}, DType::kFloat32);
  out.upload();
  fill_value(gpu_stream(), out.device().slice(1, 1000), 1.5f);
  synchronize();
  const auto got = out.download();
  for (int64_t i = 1; i < 1000; ++i) ASSERT_EQ(got[i], 1.5) << i;
  EXPECT_TRUE(std::isnan(got[0]) && std::isnan(got[1000]));
}

}  // namespace
}  // namespace muster
