#include "kernels/cuda/gpu_testing.h"
#include "kernels/elementwise/elementwise.h"

namespace muster {
namespace {

using namespace testing;
using ElementwiseGpuTest = GpuTest;

TEST_F(ElementwiseGpuTest, AddMatchesTheCpu) {
  for (const DType dtype : activation_dtypes()) {
    for (const int64_t n : {1, 7, 2048, 2049, 100003}) {
      for (const int64_t offset : {0, 1}) {  // aligned and not
        const Layout layout{.offset = offset, .row_stride = 1};
        Operand a = Operand::random({n}, dtype, 1, 1.0, 0.0, layout);
        Operand b = Operand::random({n}, dtype, 2, 3.0, 0.0, layout);
        Operand out({n}, dtype, layout);
        expect_matches_cpu({&a, &b}, {&out}, [&](const Stream& stream, const At& at) {
          add(stream, at(out), at(a), at(b));
        });
        expect_matches_cpu({&b}, {&a}, [&](const Stream& stream, const At& at) {
          add(stream, at(a), at(a), at(b));
        });
      }
    }
  }
}

TEST_F(ElementwiseGpuTest, CastRoundsToNearestEven) {
  for (const int64_t n : {1, 9, 2048, 70001}) {
    Operand wide = Operand::random({n}, DType::kFloat32, 3);
    Operand narrow({n}, DType::kBFloat16);
    Operand back({n}, DType::kFloat32);
    wide.upload();
    narrow.upload();
    back.upload();
    copy_cast(gpu_stream(), narrow.device(), wide.device());
    copy_cast(gpu_stream(), back.device(), narrow.device());
    CUDA_CHECK(cudaStreamSynchronize(static_cast<cudaStream_t>(gpu_stream().handle)));
    const auto got = back.download();
    for (int64_t i = 0; i < n; ++i) {
      const float x = wide.host().data<float>()[i];
      ASSERT_EQ(got[i], from_bf16_bits(bf16_bits(x))) << x;
    }
  }
}

TEST_F(ElementwiseGpuTest, CopyAndZero) {
  Operand x = Operand::random({1001}, DType::kBFloat16, 4);
  Operand out({1001}, DType::kBFloat16);
  expect_matches_cpu(
      {&x}, {&out}, [&](const Stream& stream, const At& at) { copy_cast(stream, at(out), at(x)); });
  expect_matches_cpu({}, {&out},
                     [&](const Stream& stream, const At& at) { fill_zero(stream, at(out)); });
}

}  // namespace
}  // namespace muster
