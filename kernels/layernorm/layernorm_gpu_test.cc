#include "kernels/cuda/gpu_testing.h"
#include "kernels/layernorm/layernorm.h"

namespace muster {
namespace {

using namespace testing;
using LayernormGpuTest = GpuTest;

constexpr float kEps = 1e-5f;

void check(DType dtype, int64_t rows, int64_t width) {
  const Shape shape{rows, width};
  Operand x = Operand::random(shape, dtype, 1, 2.0, 1.0);
  Operand weight = Operand::random({width}, dtype, 2, 0.3, 1.0);
  Operand bias = Operand::random({width}, dtype, 3);
  Operand out(shape, dtype);
  Operand mean({rows}, DType::kFloat32);
  Operand rstd({rows}, DType::kFloat32);
  expect_matches_cpu(
      {&x, &weight, &bias}, {&out, &mean, &rstd}, [&](const Stream& stream, const At& at) {
        layernorm_forward(stream, at(out), at(mean), at(rstd), at(x), at(weight), at(bias), kEps);
      });

  layernorm_forward(Stream::cpu(), out.host(), mean.host(), rstd.host(), x.host(), weight.host(),
                    bias.host(), kEps);
  Operand grad_out = Operand::random(shape, dtype, 4);
  Operand grad_weight = Operand::random({width}, DType::kFloat32, 5);
  Operand grad_bias = Operand::random({width}, DType::kFloat32, 6);
  for (const bool accumulate : {false, true}) {
    Operand grad_x = Operand::random(shape, dtype, 7);
    expect_matches_cpu({&grad_out, &x, &weight, &mean, &rstd}, {&grad_x, &grad_weight, &grad_bias},
                       [&](const Stream& stream, const At& at) {
                         layernorm_backward(stream, at(grad_x), at(grad_weight), at(grad_bias),
                                            at(grad_out), at(x), at(weight), at(mean), at(rstd),
                                            accumulate);
                       });
  }
}

TEST_F(LayernormGpuTest, MatchesTheCpu) {
  for (const DType dtype : activation_dtypes()) {
    check(dtype, 5, 3);
    check(dtype, 63, 257);
    check(dtype, 300, 768);
    check(dtype, 70, 2048);
    check(dtype, 300, 1544);
    check(dtype, 37, 8192);  // all warps for a row
    check(dtype, 3, 20000);
    check(dtype, 2, 5001);
  }
  check(DType::kFloat32, 600, 4096);  // more rows for each warp than are on the way at once
}

}  // namespace
}  // namespace muster
