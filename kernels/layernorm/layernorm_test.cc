#include "kernels/layernorm/layernorm.h"

#include "kernels/testing.h"

namespace muster {
namespace {

using namespace testing;

constexpr float kEps = 1e-5f;

template <typename T>
struct Forward {
  std::vector<T> out, mean, rstd;
};

template <typename T>
Forward<T> reference_forward(const std::vector<T>& x, const std::vector<T>& weight,
                             const std::vector<T>& bias, int64_t n) {
  const int64_t d = static_cast<int64_t>(weight.size());
  Forward<T> result{std::vector<T>(n * d), std::vector<T>(n), std::vector<T>(n)};
  for (int64_t r = 0; r < n; ++r) {
    T mean = 0;
    for (int64_t i = 0; i < d; ++i) mean += x[r * d + i] / d;
    T variance = 0;
    for (int64_t i = 0; i < d; ++i) variance += (x[r * d + i] - mean) * (x[r * d + i] - mean) / d;
    const T rstd = 1 / std::sqrt(variance + static_cast<T>(kEps));
    for (int64_t i = 0; i < d; ++i) {
      result.out[r * d + i] = (x[r * d + i] - mean) * rstd * weight[i] + bias[i];
    }
    result.mean[r] = mean;
    result.rstd[r] = rstd;
  }
  return result;
}

template <typename T>
struct Backward {
  std::vector<T> x, weight, bias;
};

// Gradients added to `start`.
template <typename T>
Backward<T> reference_backward(Backward<T> start, const std::vector<T>& grad_out,
                               const std::vector<T>& x, const std::vector<T>& weight, int64_t n) {
  const int64_t d = static_cast<int64_t>(weight.size());
  const Forward<T> f = reference_forward(x, weight, weight, n);
  for (int64_t r = 0; r < n; ++r) {
    T grad_mean = 0;
    T along_x = 0;
    for (int64_t i = 0; i < d; ++i) {
      const T g = grad_out[r * d + i] * weight[i];
      grad_mean += g / d;
      along_x += g * (x[r * d + i] - f.mean[r]) * f.rstd[r] / d;
    }
    for (int64_t i = 0; i < d; ++i) {
      const int64_t at = r * d + i;
      const T normalised = (x[at] - f.mean[r]) * f.rstd[r];
      start.x[at] += f.rstd[r] * (grad_out[at] * weight[i] - grad_mean - normalised * along_x);
      start.weight[i] += grad_out[at] * normalised;
      start.bias[i] += grad_out[at];
    }
  }
  return start;
}

// Inputs and forward results of one call.
struct Case {
  int64_t n, d;
  Tensor x, weight, bias, grad_out, out, mean, rstd;

  Case(int64_t rows, int64_t size, double x_mean = 0.5)
      : n(rows),
        d(size),
        x(random_tensor({n, d}, 1, 2.0, x_mean)),
        weight(random_tensor({d}, 2, 0.3, 1.0)),
        bias(random_tensor({d}, 3)),
        grad_out(random_tensor({n, d}, 4)),
        out(poisoned({n, d})),
        mean(poisoned({n})),
        rstd(poisoned({n})) {
    layernorm_forward(Stream::cpu(), out, mean, rstd, x, weight, bias, kEps);
  }
  template <typename T>
  Forward<T> forward() const {
    return reference_forward(to_vector<T>(x), to_vector<T>(weight), to_vector<T>(bias), n);
  }
  template <typename T>
  Backward<T> backward(const Tensor& start_x, const Tensor& start_weight,
                       const Tensor& start_bias) const {
    return reference_backward<T>(
        {to_vector<T>(start_x), to_vector<T>(start_weight), to_vector<T>(start_bias)},
        to_vector<T>(grad_out), to_vector<T>(x), to_vector<T>(weight), n);
  }
};

TEST(LayernormTest, ForwardMatchesTheReference) {
  for (const int64_t d : {1, 3, 17, 257}) {
    for (const int64_t n : {0, 1, 5, 63}) {
      // A mean far from zero would ruin a variance taken as E[x²] − E[x]².
      for (const double x_mean : {0.5, 300.0}) {
        const Case c(n, d, x_mean);
        const auto want = c.forward<double>();
        const auto naive = c.forward<float>();
        expect_close(c.out, want.out, naive.out);
        expect_close(c.mean, want.mean, naive.mean);
        expect_close(c.rstd, want.rstd, naive.rstd);
      }
    }
  }
}

TEST(LayernormTest, BackwardMatchesTheReference) {
  for (const int64_t d : {1, 3, 17, 257}) {
    for (const int64_t n : {0, 1, 5, 63}) {
      for (const bool accumulate : {false, true}) {
        const Case c(n, d);
        const Tensor start =
            accumulate ? random_tensor({n, d}, 5) : Tensor::zeros({n, d}, DType::kFloat32);
        const Tensor grad_weight = random_tensor({d}, 6);
        const Tensor grad_bias = random_tensor({d}, 7);
        const auto want = c.backward<double>(start, grad_weight, grad_bias);
        const auto naive = c.backward<float>(start, grad_weight, grad_bias);
        const Tensor grad_x = accumulate ? start : poisoned({n, d});
        layernorm_backward(Stream::cpu(), grad_x, grad_weight, grad_bias, c.grad_out, c.x, c.weight,
                           c.mean, c.rstd, accumulate);
        if (d == 1) {
          // A gradient of zero: what is left is the rounding of grad_out · weight, times rstd.
          const double scale =
              max_error(to_vector<float>(c.grad_out), std::vector<double>(n)) / std::sqrt(kEps);
          EXPECT_LE(max_error(to_vector<float>(grad_x), want.x), 2e-7 * scale);
        } else {
          expect_close(grad_x, want.x, naive.x);
        }
        expect_close(grad_weight, want.weight, naive.weight);
        expect_close(grad_bias, want.bias, naive.bias);
      }
    }
  }
}

TEST(LayernormTest, GradientsMatchFiniteDifferences) {
  const Case c(3, 19);
  const Tensor grad_x = poisoned({c.n, c.d});
  const Tensor grad_weight = Tensor::zeros({c.d}, DType::kFloat32);
  const Tensor grad_bias = Tensor::zeros({c.d}, DType::kFloat32);
  layernorm_backward(Stream::cpu(), grad_x, grad_weight, grad_bias, c.grad_out, c.x, c.weight,
                     c.mean, c.rstd);
  const std::vector<double> g = to_vector<double>(c.grad_out);
  const std::vector<double> at_x = to_vector<double>(c.x);
  const std::vector<double> at_weight = to_vector<double>(c.weight);
  const std::vector<double> at_bias = to_vector<double>(c.bias);
  const auto loss = [&](const std::vector<double>& x, const std::vector<double>& weight,
                        const std::vector<double>& bias) {
    return dot(reference_forward(x, weight, bias, c.n).out, g);
  };
  using Values = const std::vector<double>&;
  expect_gradient(grad_x,
                  finite_difference([&](Values at) { return loss(at, at_weight, at_bias); }, at_x));
  expect_gradient(grad_weight,
                  finite_difference([&](Values at) { return loss(at_x, at, at_bias); }, at_weight));
  expect_gradient(grad_bias,
                  finite_difference([&](Values at) { return loss(at_x, at_weight, at); }, at_bias));
}

TEST(LayernormTest, WorksInPlaceAndOnStridedRows) {
  const Case c(5, 17);
  const Tensor want_grad = poisoned({c.n, c.d});
  Tensor sums[4];
  for (Tensor& sum : sums) sum = Tensor::zeros({c.d}, DType::kFloat32);
  layernorm_backward(Stream::cpu(), want_grad, sums[0], sums[1], c.grad_out, c.x, c.weight, c.mean,
                     c.rstd);
  const Strided x({c.n, c.d}, 3, c.d + 8);
  const Strided grad({c.n, c.d}, 1, c.d + 2);
  assign(x, to_vector<float>(c.x));
  assign(grad, to_vector<float>(c.grad_out));
  layernorm_backward(Stream::cpu(), grad, sums[2], sums[3], grad, x, c.weight, c.mean, c.rstd);
  layernorm_forward(Stream::cpu(), x, c.mean, c.rstd, x, c.weight, c.bias, kEps);
  expect_same_bits(x.view(), c.out);
  expect_same_bits(grad.view(), want_grad);
  expect_same_bits(sums[0], sums[2]);
  expect_same_bits(sums[1], sums[3]);
  x.expect_gaps_untouched();
  grad.expect_gaps_untouched();
}

TEST(LayernormTest, ThreadCountChangesNoBit) {
  Tensor out[2], grad_x[2], grad_weight[2], grad_bias[2];
  for (const int run : {0, 1}) {
    const ThreadCount count(run == 0 ? 1 : 3);
    const Case c(301, 129);
    out[run] = c.out;
    grad_x[run] = poisoned({c.n, c.d});
    grad_weight[run] = Tensor::zeros({c.d}, DType::kFloat32);
    grad_bias[run] = Tensor::zeros({c.d}, DType::kFloat32);
    layernorm_backward(Stream::cpu(), grad_x[run], grad_weight[run], grad_bias[run], c.grad_out,
                       c.x, c.weight, c.mean, c.rstd);
  }
  expect_same_bits(out[0], out[1]);
  expect_same_bits(grad_x[0], grad_x[1]);
  expect_same_bits(grad_weight[0], grad_weight[1]);
  expect_same_bits(grad_bias[0], grad_bias[1]);
}

}  // namespace
}  // namespace muster
