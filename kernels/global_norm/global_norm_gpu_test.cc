#include "kernels/cuda/gpu_testing.h"
#include "kernels/global_norm/global_norm.h"

namespace muster {
namespace {

using namespace testing;
using GlobalNormGpuTest = GpuTest;

TEST_F(GlobalNormGpuTest, MatchesTheCpuAndAccumulates) {
  for (const int64_t n : {1, 31, 8192, 8193, 1000003}) {
    for (const int64_t offset : {0, 1}) {
      Operand x = Operand::random({n}, DType::kFloat32, 1, 1.0, 0.0, {offset, 1});
      Operand sum = Operand::scalar(0.5);
      // The naive version of a sum in float32 errs in its last bits, far above float64's.
      expect_matches_cpu(
          {&x}, {&sum},
          [&](const Stream& stream, const At& at) { sum_of_squares(stream, at(sum), at(x)); },
          16.0);
    }
  }
}

TEST_F(GlobalNormGpuTest, DoesNotDependOnAlignment) {
  const int64_t n = 50001;
  std::vector<double> sums;
  for (const int64_t offset : {0, 1}) {
    Operand x = Operand::random({n}, DType::kFloat32, 1, 1.0, 0.0, {offset, 1});
    Operand sum = Operand::scalar(0.0);
    x.upload();
    sum.upload();
    sum_of_squares(gpu_stream(), sum.device(), x.device());
    CUDA_CHECK(cudaStreamSynchronize(static_cast<cudaStream_t>(gpu_stream().handle)));
    sums.push_back(sum.download()[0]);
  }
  EXPECT_EQ(sums[0], sums[1]);
}

}  // namespace
}  // namespace muster
