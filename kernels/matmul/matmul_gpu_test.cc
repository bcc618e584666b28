#include "kernels/cuda/gpu_testing.h"
#include "kernels/matmul/matmul.h"

namespace muster {
namespace {

using namespace testing;
using MatmulGpuTest = GpuTest;

Operand matrix(int64_t rows, int64_t columns, DType dtype, uint64_t seed, int64_t gap) {
  return Operand::random({rows, columns}, dtype, seed, 1.0, 0.0, {gap, columns + 2 * gap});
}

void check(int64_t m, int64_t n, int64_t k, DType dtype, DType out_type, int64_t gap) {
  for (const bool transpose_a : {false, true}) {
    for (const bool transpose_b : {false, true}) {
      for (const bool accumulate : {false, true}) {
        SCOPED_TRACE(Shape({m, n, k}).to_string());
        Operand a = transpose_a ? matrix(k, m, dtype, 1, gap) : matrix(m, k, dtype, 1, gap);
        Operand b = transpose_b ? matrix(n, k, dtype, 2, gap) : matrix(k, n, dtype, 2, gap);
        Operand out = matrix(m, n, out_type, 3, gap);
        expect_matches_cpu({&a, &b}, {&out}, [&](const Stream& stream, const At& at) {
          matmul(stream, at(out), at(a), at(b), {transpose_a, transpose_b, accumulate});
        });
      }
    }
  }
}

TEST_F(MatmulGpuTest, MatchesTheCpu) {
  for (const DType dtype : activation_dtypes()) {
    for (const DType out_type : {dtype, DType::kFloat32}) {
      check(1, 1, 1, dtype, out_type, 0);
      check(5, 7, 3, dtype, out_type, 0);
      check(33, 65, 17, dtype, out_type, 3);
      check(128, 64, 256, dtype, out_type, 0);
      check(72, 136, 200, dtype, out_type, 8);
    }
  }
}

// [tokens, output features, input features] of a layer; cuBLASLt refuses some of them.
const std::vector<std::array<int64_t, 3>> kLayers = {
    {1, 5, 3}, {300, 40, 64}, {77, 129, 31}, {256, 384, 128}};

TEST_F(MatmulGpuTest, LinearForwardMatchesTheCpu) {
  for (const DType dtype : activation_dtypes()) {
    for (const auto& [m, n, k] : kLayers) {
      SCOPED_TRACE(Shape({m, n, k}).to_string() + name_of(dtype));
      Operand x = Operand::random({m, k}, dtype, 1);
      Operand weight = Operand::random({n, k}, dtype, 2);
      Operand bias = Operand::random({n}, dtype, 3);
      Operand residual = matrix(m, n, dtype, 4, 8);
      Operand out({m, n}, dtype);
      for (const bool with_bias : {false, true}) {
        const auto b = [&](const At& at) { return with_bias ? at(bias) : TensorView(); };
        expect_matches_cpu({&x, &weight, &bias}, {&out}, [&](const Stream& stream, const At& at) {
          linear_forward(stream, at(out), at(x), at(weight), b(at));
        });
        expect_matches_cpu(
            {&x, &weight, &bias, &residual}, {&out}, [&](const Stream& stream, const At& at) {
              linear_forward(stream, at(out), at(x), at(weight), b(at), at(residual));
            });
        Operand sum = matrix(m, n, dtype, 5, 8);
        expect_matches_cpu({&x, &weight, &bias}, {&sum}, [&](const Stream& stream, const At& at) {
          linear_forward(stream, at(sum), at(x), at(weight), b(at), at(sum));
        });
      }
    }
  }
}

TEST_F(MatmulGpuTest, LinearBackwardMatchesTheCpu) {
  for (const DType dtype : activation_dtypes()) {
    for (const auto& [m, n, k] : kLayers) {
      SCOPED_TRACE(Shape({m, n, k}).to_string() + name_of(dtype));
      Operand x = Operand::random({m, k}, dtype, 1);
      Operand weight = Operand::random({n, k}, dtype, 2);
      Operand grad_out = Operand::random({m, n}, dtype, 4);
      Operand added = Operand::random({n, k}, DType::kFloat32, 5);
      Operand written({n, k}, DType::kFloat32);
      Operand grad_bias = Operand::random({n}, DType::kFloat32, 6);
      Operand grad_x({m, k}, dtype);
      for (const bool accumulate : {false, true}) {
        Operand& grad_weight = accumulate ? added : written;
        expect_matches_cpu({&grad_out, &x, &weight}, {&grad_x, &grad_weight, &grad_bias},
                           [&](const Stream& stream, const At& at) {
                             linear_backward(stream, at(grad_x), at(grad_weight), at(grad_bias),
                                             at(grad_out), at(x), at(weight), accumulate);
                           });
      }
    }
  }
}

TEST_F(MatmulGpuTest, GeluVariantsMatchTheCpu) {
  for (const DType dtype : activation_dtypes()) {
    for (const auto& [m, n, k] : kLayers) {
      SCOPED_TRACE(Shape({m, n, k}).to_string() + name_of(dtype));
      Operand x = Operand::random({m, k}, dtype, 1);
      Operand weight = Operand::random({n, k}, dtype, 2, 0.2);
      Operand bias = Operand::random({n}, dtype, 3);
      Operand hidden({m, n}, dtype);
      Operand out({m, n}, dtype);
      for (const bool with_bias : {false, true}) {
        expect_matches_cpu({&x, &weight, &bias}, {&out, &hidden},
                           [&](const Stream& stream, const At& at) {
                             linear_gelu_forward(stream, at(out), at(hidden), at(x), at(weight),
                                                 with_bias ? at(bias) : TensorView());
                           });
      }
      Operand grad_out = Operand::random({m, n}, dtype, 4);
      Operand before = Operand::random({m, k}, dtype, 5, 2.0);
      Operand grad_bias = Operand::random({k}, DType::kFloat32, 6);
      Operand grad_hidden({m, k}, dtype);
      expect_matches_cpu({&grad_out, &weight, &before}, {&grad_hidden, &grad_bias},
                         [&](const Stream& stream, const At& at) {
                           linear_gelu_backward(stream, at(grad_hidden), at(grad_bias),
                                                at(grad_out), at(weight), at(before));
                         });
      expect_matches_cpu({&grad_out, &weight}, {&before, &grad_bias},
                         [&](const Stream& stream, const At& at) {
                           linear_gelu_backward(stream, at(before), at(grad_bias), at(grad_out),
                                                at(weight), at(before));
                         });
    }
  }
}

TEST_F(MatmulGpuTest, AnEmptySumIsZero) {
  Operand a({3, 0}, DType::kBFloat16);
  Operand b({0, 5}, DType::kBFloat16);
  Operand out({3, 5}, DType::kBFloat16);
  expect_matches_cpu({&a, &b}, {&out}, [&](const Stream& stream, const At& at) {
    matmul(stream, at(out), at(a), at(b));
  });
}

}  // namespace
}  // namespace muster
