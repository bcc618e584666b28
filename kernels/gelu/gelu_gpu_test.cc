#include "kernels/cuda/gpu_testing.h"
#include "kernels/gelu/gelu.h"

namespace muster {
namespace {

using namespace testing;
using GeluGpuTest = GpuTest;

TEST_F(GeluGpuTest, MatchesTheCpu) {
  for (const DType dtype : activation_dtypes()) {
    for (const Shape& shape : {Shape{1, 1}, Shape{3, 7}, Shape{17, 257}, Shape{64, 768}}) {
      Operand x = Operand::random(shape, dtype, 1, 3.0);
      Operand grad_out = Operand::random(shape, dtype, 2);
      Operand out(shape, dtype);
      Operand grad_x(shape, dtype);
      expect_matches_cpu({&x}, {&out}, [&](const Stream& stream, const At& at) {
        gelu_forward(stream, at(out), at(x));
      });
      const auto backward = [&](Operand& to) {
        return [&](const Stream& stream, const At& at) {
          gelu_backward(stream, at(to), at(grad_out), at(x));
        };
      };
      expect_matches_cpu({&x, &grad_out}, {&grad_x}, backward(grad_x));
      expect_matches_cpu({&x}, {&grad_out}, backward(grad_out));  // in place
    }
  }
}

TEST_F(GeluGpuTest, LargeInputsNeitherOverflowNorCancel) {
  for (const DType dtype : activation_dtypes()) {
    Operand x = Operand::random({1000}, dtype, 1, 100.0);
    Operand out({1000}, dtype);
    expect_matches_cpu({&x}, {&out}, [&](const Stream& stream, const At& at) {
      gelu_forward(stream, at(out), at(x));
    });
  }
}

}  // namespace
}  // namespace muster
