#include "kernels/cuda/gpu_testing.h"
#include "kernels/swiglu/swiglu.h"

namespace muster {
namespace {

using namespace testing;
using SwigluGpuTest = GpuTest;

void check(DType dtype, int64_t rows, int64_t width, int64_t gap) {
  const Layout wide{.offset = gap, .row_stride = 2 * width + 2 * gap};
  const Layout narrow{.offset = gap, .row_stride = width + 2 * gap};
  Operand gate_up = Operand::random({rows, 2 * width}, dtype, 1, 3.0, 0.0, wide);
  Operand grad_out = Operand::random({rows, width}, dtype, 2, 1.0, 0.0, narrow);
  Operand out({rows, width}, dtype, narrow);
  Operand grad({rows, 2 * width}, dtype, wide);
  expect_matches_cpu({&gate_up}, {&out}, [&](const Stream& stream, const At& at) {
    swiglu_forward(stream, at(out), at(gate_up));
  });
  expect_matches_cpu({&gate_up, &grad_out}, {&grad}, [&](const Stream& stream, const At& at) {
    swiglu_backward(stream, at(grad), at(grad_out), at(gate_up));
  });
  expect_matches_cpu({&grad_out}, {&gate_up}, [&](const Stream& stream, const At& at) {
    swiglu_backward(stream, at(gate_up), at(grad_out), at(gate_up));  // in place
  });
}

// The largest magnitude is that of the numbers as they were stored.
TEST_F(SwigluGpuTest, AmaxIsThatOfTheResult) {
  for (const DType dtype : activation_dtypes()) {
    for (const auto& [rows, width] : {std::pair<int64_t, int64_t>{1, 1}, {37, 13}, {70, 2056}}) {
      Operand gate_up = Operand::random({rows, 2 * width}, dtype, 1, 3.0);
      Operand grad_out = Operand::random({rows, width}, dtype, 2);
      Operand out({rows, width}, dtype);
      Operand amax({1}, DType::kFloat32);
      const auto expect_amax = [&](const Operand& result, const auto& call) {
        for (const float before : {0.0f, 1e-6f, 1e6f}) {
          amax.host().data<float>()[0] = before;
          amax.upload();
          gate_up.upload();
          grad_out.upload();
          call();
          CUDA_CHECK(cudaStreamSynchronize(static_cast<cudaStream_t>(gpu_stream().handle)));
          double want = before;
          for (const double x : result.download()) want = std::max(want, std::abs(x));
          EXPECT_EQ(amax.download()[0], want);
        }
      };
      expect_amax(out, [&] {
        swiglu_forward(gpu_stream(), out.device(), gate_up.device(), amax.device());
      });
      expect_amax(gate_up, [&] {
        swiglu_backward(gpu_stream(), gate_up.device(), grad_out.device(), gate_up.device(),
                        amax.device());
      });
    }
  }
}

TEST_F(SwigluGpuTest, MatchesTheCpu) {
  for (const DType dtype : activation_dtypes()) {
    check(dtype, 1, 1, 0);
    check(dtype, 5, 13, 0);
    check(dtype, 7, 13, 3);
    check(dtype, 33, 264, 0);
    check(dtype, 9, 2056, 8);
  }
}

}  // namespace
}  // namespace muster
