#include "kernels/matmul/matmul.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/gelu/gelu.h"
#include "kernels/testing.h"

namespace muster {
namespace {

using ::muster::testing::expect_close;
using ::muster::testing::expect_gradient;
using ::muster::testing::expect_same_bits;
using ::muster::testing::fill_random;
using ::muster::testing::finite_difference;
using ::muster::testing::poisoned;
using ::muster::testing::random_tensor;
using ::muster::testing::Strided;
using ::muster::testing::ThreadCount;
using ::muster::testing::to_vector;

// c + op(a) · op(b), one sum after the other. c may be empty (zeros).
template <typename T>
std::vector<T> product(const std::vector<T>& a, const std::vector<T>& b, int64_t m, int64_t n,
                       int64_t k, bool transpose_a, bool transpose_b, std::vector<T> c = {}) {
  c.resize(m * n, T(0));
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      T sum = 0;
      for (int64_t p = 0; p < k; ++p) {
        sum += a[transpose_a ? p * m + i : i * k + p] * b[transpose_b ? j * k + p : p * n + j];
      }
      c[i * n + j] += sum;
    }
  }
  return c;
}

struct Case {
  int64_t m, n, k;
};

class MatmulTest : public ::testing::TestWithParam<Case> {};

TEST_P(MatmulTest, MatchesTheReferenceInEveryOrientation) {
  const auto [m, n, k] = GetParam();
  for (int flags = 0; flags < 8; ++flags) {
    SCOPED_TRACE(flags);
    const bool ta = (flags & 1) != 0;
    const bool tb = (flags & 2) != 0;
    const bool accumulate = (flags & 4) != 0;
    const Tensor a = random_tensor(ta ? Shape{k, m} : Shape{m, k}, 1);
    const Tensor b = random_tensor(tb ? Shape{n, k} : Shape{k, n}, 2);
    const Tensor out = accumulate ? random_tensor({m, n}, 3) : poisoned({m, n});
    const auto before = accumulate ? to_vector<double>(out) : std::vector<double>();
    const auto want = product(to_vector<double>(a), to_vector<double>(b), m, n, k, ta, tb, before);
    const auto naive = product(to_vector<float>(a), to_vector<float>(b), m, n, k, ta, tb,
                               std::vector<float>(before.begin(), before.end()));
    matmul(Stream::cpu(), out, a, b,
           {.transpose_a = ta, .transpose_b = tb, .accumulate = accumulate});
    expect_close(out, want, naive);
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, MatmulTest,
                         ::testing::Values(Case{1, 1, 1}, Case{1, 257, 33}, Case{5, 3, 2},
                                           Case{33, 65, 17}, Case{130, 47, 95}, Case{257, 31, 129},
                                           Case{16, 48, 700}, Case{7, 5, 0}, Case{0, 5, 3}),
                         [](const auto& test) {
                           return std::to_string(test.param.m) + "x" +
                                  std::to_string(test.param.n) + "x" + std::to_string(test.param.k);
                         });

TEST(MatmulStrideTest, RowsMayLieApart) {
  const int64_t m = 37;
  const int64_t n = 29;
  const int64_t k = 41;
  for (const bool transpose : {false, true}) {
    Strided a(transpose ? Shape{k, m} : Shape{m, k}, 3, 71);
    Strided b(transpose ? Shape{n, k} : Shape{k, n}, 5, 64);
    Strided out({m, n}, 7, 50);
    fill_random(a, 1);
    fill_random(b, 2);
    matmul(Stream::cpu(), out, a, b, {.transpose_a = transpose, .transpose_b = transpose});
    const auto want =
        product(to_vector<double>(a), to_vector<double>(b), m, n, k, transpose, transpose);
    const auto naive =
        product(to_vector<float>(a), to_vector<float>(b), m, n, k, transpose, transpose);
    expect_close(out, want, naive);
    out.expect_gaps_untouched();
  }
}

// Sums along k are where a library would split the work over threads.
TEST(MatmulThreadTest, ResultsDoNotDependOnThreads) {
  for (const Case& c : {Case{193, 70, 3000}, Case{16, 16, 20000}, Case{700, 257, 96}}) {
    for (const bool transpose : {false, true}) {
      const Tensor a = random_tensor(transpose ? Shape{c.k, c.m} : Shape{c.m, c.k}, 1);
      const Tensor b = random_tensor(transpose ? Shape{c.n, c.k} : Shape{c.k, c.n}, 2);
      const MatmulOptions options{.transpose_a = transpose, .transpose_b = transpose};
      const Tensor one = poisoned({c.m, c.n});
      {
        const ThreadCount threads(1);
        matmul(Stream::cpu(), one, a, b, options);
      }
      for (const int count : {2, 3, 5}) {
        const ThreadCount threads(count);
        const Tensor many = poisoned({c.m, c.n});
        matmul(Stream::cpu(), many, a, b, options);
        expect_same_bits(one, many);
      }
    }
  }
}

TEST(LinearTest, ForwardAddsBiasAndResidual) {
  const int64_t m = 131;
  const int64_t n = 45;
  const int64_t k = 33;
  const Tensor x = random_tensor({m, k}, 1);
  const Tensor weight = random_tensor({n, k}, 2);
  const Tensor bias = random_tensor({n}, 3);
  for (const bool with_bias : {false, true}) {
    for (const bool with_residual : {false, true}) {
      Strided residual({m, n}, 4, 52);
      fill_random(residual, 4);
      std::vector<double> rows(m * n, 0.0);
      if (with_residual) rows = to_vector<double>(residual.view());
      for (int64_t i = 0; i < m * n && with_bias; ++i) rows[i] += bias.data<float>()[i % n];
      const auto want =
          product(to_vector<double>(x), to_vector<double>(weight), m, n, k, false, true, rows);
      const auto naive = product(to_vector<float>(x), to_vector<float>(weight), m, n, k, false,
                                 true, std::vector<float>(rows.begin(), rows.end()));
      Strided out({m, n}, 2, 61);
      const ConstTensorView b = with_bias ? bias.view() : TensorView();
      linear_forward(Stream::cpu(), out, x, weight, b,
                     with_residual ? residual.view() : TensorView());
      expect_close(out.view(), want, naive);
      out.expect_gaps_untouched();
      if (!with_residual) continue;
      linear_forward(Stream::cpu(), residual, x, weight, b, residual.view());
      expect_close(residual.view(), want, naive);
      residual.expect_gaps_untouched();
    }
  }
}

// loss = Σ (x · weightᵀ + bias) · g
TEST(LinearTest, BackwardMatchesFiniteDifferences) {
  const int64_t m = 9;
  const int64_t n = 5;
  const int64_t k = 7;
  const Tensor x = random_tensor({m, k}, 1);
  const Tensor weight = random_tensor({n, k}, 2);
  const Tensor bias = random_tensor({n}, 3);
  const Tensor grad_out = random_tensor({m, n}, 4);
  const auto g = to_vector<double>(grad_out);
  const auto loss = [&](const std::vector<double>& x_, const std::vector<double>& weight_,
                        const std::vector<double>& bias_) {
    std::vector<double> rows(m * n);
    for (int64_t i = 0; i < m * n; ++i) rows[i] = bias_[i % n];
    return testing::dot(product(x_, weight_, m, n, k, false, true, rows), g);
  };
  const auto x0 = to_vector<double>(x);
  const auto weight0 = to_vector<double>(weight);
  const auto bias0 = to_vector<double>(bias);
  const Tensor grad_x = poisoned({m, k});
  const Tensor grad_weight = Tensor::zeros({n, k}, DType::kFloat32);
  const Tensor grad_bias = Tensor::zeros({n}, DType::kFloat32);
  linear_backward(Stream::cpu(), grad_x, grad_weight, grad_bias, grad_out, x, weight);
  expect_gradient(grad_x, finite_difference([&](auto v) { return loss(v, weight0, bias0); }, x0));
  expect_gradient(grad_weight,
                  finite_difference([&](auto v) { return loss(x0, v, bias0); }, weight0));
  expect_gradient(grad_bias,
                  finite_difference([&](auto v) { return loss(x0, weight0, v); }, bias0));
}

TEST(LinearTest, BackwardAccumulatesAndLeavesOutUndefinedResults) {
  const int64_t m = 300;
  const int64_t n = 67;
  const int64_t k = 40;
  const Tensor x = random_tensor({m, k}, 1);
  const Tensor weight = random_tensor({n, k}, 2);
  const Tensor grad_out = random_tensor({m, n}, 4);
  const Tensor grad_x = poisoned({m, k});
  const Tensor grad_weight = random_tensor({n, k}, 6);
  const Tensor first_grad_weight = poisoned({n, k});
  const Tensor grad_bias = random_tensor({n}, 7);
  const auto reference = [&]<typename T>(T) {
    const auto g = to_vector<T>(grad_out);
    return std::vector<std::vector<T>>{
        product(g, to_vector<T>(weight), m, k, n, false, false),
        product(g, to_vector<T>(x), n, k, m, true, false, to_vector<T>(grad_weight)),
        product(g, std::vector<T>(m, T(1)), n, 1, m, true, false, to_vector<T>(grad_bias)),
        product(g, to_vector<T>(x), n, k, m, true, false)};
  };
  const auto want = reference(0.0);
  const auto naive = reference(0.0f);
  linear_backward(Stream::cpu(), grad_x, {}, {}, grad_out, {}, weight);
  linear_backward(Stream::cpu(), {}, grad_weight, {}, grad_out, x, {});
  linear_backward(Stream::cpu(), {}, {}, grad_bias, grad_out, {}, {});
  linear_backward(Stream::cpu(), {}, first_grad_weight, {}, grad_out, x, {}, false);
  expect_close(grad_x, want[0], naive[0]);
  expect_close(grad_weight, want[1], naive[1]);
  expect_close(grad_bias, want[2], naive[2]);
  expect_close(first_grad_weight, want[3], naive[3]);
}

// The fused pairs are their parts.
TEST(LinearTest, GeluVariantsEqualTheirParts) {
  const int64_t m = 67;
  const int64_t n = 33;
  const int64_t k = 45;
  const Stream cpu = Stream::cpu();
  const Tensor x = random_tensor({m, n}, 1);
  const Tensor weight = random_tensor({k, n}, 2);
  const Tensor bias = random_tensor({k}, 3);
  const Tensor hidden = poisoned({m, k});
  const Tensor out = poisoned({m, k});
  const Tensor want_hidden = poisoned({m, k});
  const Tensor want_out = poisoned({m, k});
  linear_gelu_forward(cpu, out, hidden, x, weight, bias);
  linear_forward(cpu, want_hidden, x, weight, bias);
  gelu_forward(cpu, want_out, want_hidden);
  expect_same_bits(hidden, want_hidden);
  expect_same_bits(out, want_out);

  const Tensor next = random_tensor({n, k}, 4);
  const Tensor grad_out = random_tensor({m, n}, 5);
  const Tensor grad_bias = random_tensor({k}, 6);
  const Tensor want_bias = random_tensor({k}, 6);
  const Tensor grad = poisoned({m, k});
  linear_backward(cpu, grad, {}, {}, grad_out, {}, next);
  gelu_backward(cpu, grad, grad, hidden);
  linear_backward(cpu, {}, {}, want_bias, grad, {}, {});
  const Tensor grad_hidden = poisoned({m, k});
  linear_gelu_backward(cpu, grad_hidden, {}, grad_out, next, hidden);
  expect_same_bits(grad_hidden, grad);
  linear_gelu_backward(cpu, hidden, grad_bias, grad_out, next, hidden);
  expect_same_bits(hidden, grad);
  expect_same_bits(grad_bias, want_bias);
}

TEST(MatmulDeathTest, WrongShapesAreNamed) {
  const Tensor a = poisoned({2, 3});
  const Tensor b = poisoned({4, 5});
  const Tensor out = poisoned({2, 5});
  EXPECT_DEATH(matmul(Stream::cpu(), out, a, b), "b \\[4, 5\\], expected \\[3, 5\\]");
}

}  // namespace
}  // namespace muster
