#include "kernels/cuda/gpu_testing.h"
#include "kernels/rmsnorm/rmsnorm.h"

namespace muster {
namespace {

using namespace testing;
using RmsnormGpuTest = GpuTest;

constexpr float kEps = 1e-5f;

// x [rows..., width]; a gap before and after each row of the first dimension.
void check(DType dtype, const Shape& shape, int64_t gap) {
  const int64_t width = shape[shape.rank - 1];
  const int64_t rows = shape.numel() / width;
  const int64_t inner = shape.numel() / shape[0];
  const Layout layout{.offset = gap, .row_stride = inner + 2 * gap};
  Operand x = Operand::random(shape, dtype, 1, 2.0, 0.1, layout);
  Operand weight = Operand::random({width}, dtype, 2, 0.3, 1.0);
  Operand out(shape, dtype, layout);
  Operand rstd({rows}, DType::kFloat32);
  expect_matches_cpu({&x, &weight}, {&out, &rstd}, [&](const Stream& stream, const At& at) {
    rmsnorm_forward(stream, at(out), at(rstd), at(x), at(weight), kEps);
  });

  rmsnorm_forward(Stream::cpu(), out.host(), rstd.host(), x.host(), weight.host(), kEps);
  Operand grad_out = Operand::random(shape, dtype, 3, 1.0, 0.0, layout);
  Operand grad_weight = Operand::random({width}, DType::kFloat32, 4);
  for (const bool accumulate : {false, true}) {
    Operand grad_x = Operand::random(shape, dtype, 5, 1.0, 0.0, layout);
    expect_matches_cpu({&grad_out, &x, &weight, &rstd}, {&grad_x, &grad_weight},
                       [&](const Stream& stream, const At& at) {
                         rmsnorm_backward(stream, at(grad_x), at(grad_weight), at(grad_out), at(x),
                                          at(weight), at(rstd), accumulate);
                       });
  }
  expect_matches_cpu({&x, &weight, &rstd}, {&grad_out, &grad_weight},
                     [&](const Stream& stream, const At& at) {  // in place
                       rmsnorm_backward(stream, at(grad_out), at(grad_weight), at(grad_out), at(x),
                                        at(weight), at(rstd));
                     });
}

TEST_F(RmsnormGpuTest, MatchesTheCpu) {
  for (const DType dtype : activation_dtypes()) {
    check(dtype, {1, 1}, 0);
    check(dtype, {5, 3}, 2);
    check(dtype, {63, 257}, 0);
    check(dtype, {200, 768}, 0);
    check(dtype, {70, 2048}, 8);
    check(dtype, {300, 1536}, 16);
    check(dtype, {37, 8192}, 0);  // half the warps or all for a row
    check(dtype, {3, 20000}, 0);  // more than the registers hold
    check(dtype, {2, 5001}, 1);   // the same, without vectors
  }
  check(DType::kFloat32, {600, 4096}, 0);  // more rows for each warp than are on the way at once
}

TEST_F(RmsnormGpuTest, NormalisesTheHeadsOfAQkvBuffer) {
  for (const DType dtype : activation_dtypes()) {
    check(dtype, {33, 5, 64}, 64);
    check(dtype, {9, 3, 10}, 3);
    check(dtype, {40, 8, 128}, 256);
  }
}

}  // namespace
}  // namespace muster
