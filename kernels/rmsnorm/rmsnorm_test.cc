#include "kernels/rmsnorm/rmsnorm.h"

#include "kernels/testing.h"

namespace muster {
namespace {

using namespace testing;

constexpr float kEps = 1e-5f;

template <typename T>
struct Forward {
  std::vector<T> out, rstd;
};

template <typename T>
Forward<T> reference_forward(const std::vector<T>& x, const std::vector<T>& weight, int64_t n) {
  const int64_t d = static_cast<int64_t>(weight.size());
  Forward<T> result{std::vector<T>(n * d), std::vector<T>(n)};
  for (int64_t r = 0; r < n; ++r) {
    T squares = 0;
    for (int64_t i = 0; i < d; ++i) squares += x[r * d + i] * x[r * d + i];
    result.rstd[r] = 1 / std::sqrt(squares / d + static_cast<T>(kEps));
    for (int64_t i = 0; i < d; ++i) {
      result.out[r * d + i] = x[r * d + i] * result.rstd[r] * weight[i];
    }
  }
  return result;
}

template <typename T>
struct Backward {
  std::vector<T> x, weight;
};

// Gradients added to `start`.
template <typename T>
Backward<T> reference_backward(Backward<T> start, const std::vector<T>& grad_out,
                               const std::vector<T>& x, const std::vector<T>& weight, int64_t n) {
  const int64_t d = static_cast<int64_t>(weight.size());
  const std::vector<T> rstd = reference_forward(x, weight, n).rstd;
  for (int64_t r = 0; r < n; ++r) {
    T mean = 0;
    for (int64_t i = 0; i < d; ++i) mean += grad_out[r * d + i] * weight[i] * x[r * d + i] / d;
    for (int64_t i = 0; i < d; ++i) {
      const int64_t at = r * d + i;
      start.x[at] += rstd[r] * (grad_out[at] * weight[i] - x[at] * rstd[r] * rstd[r] * mean);
      start.weight[i] += grad_out[at] * x[at] * rstd[r];
    }
  }
  return start;
}

template <typename T>
Backward<T> reference_backward(const ConstTensorView& start_x, const ConstTensorView& start_weight,
                               const ConstTensorView& grad_out, const ConstTensorView& x,
                               const ConstTensorView& weight) {
  return reference_backward<T>({to_vector<T>(start_x), to_vector<T>(start_weight)},
                               to_vector<T>(grad_out), to_vector<T>(x), to_vector<T>(weight),
                               x.numel() / weight.numel());
}

TEST(RmsnormTest, ForwardMatchesTheReference) {
  for (const int64_t d : {1, 3, 17, 257}) {
    for (const int64_t n : {0, 1, 5, 63}) {
      const Tensor x = random_tensor({n, d}, 1, 2.0);
      const Tensor weight = random_tensor({d}, 2, 0.3, 1.0);
      const Tensor out = poisoned({n, d});
      const Tensor rstd = poisoned({n});
      rmsnorm_forward(Stream::cpu(), out, rstd, x, weight, kEps);
      const auto want = reference_forward(to_vector<double>(x), to_vector<double>(weight), n);
      const auto naive = reference_forward(to_vector<float>(x), to_vector<float>(weight), n);
      expect_close(out, want.out, naive.out);
      expect_close(rstd, want.rstd, naive.rstd);
    }
  }
}

TEST(RmsnormTest, BackwardMatchesTheReference) {
  for (const int64_t d : {1, 3, 17, 257}) {
    for (const int64_t n : {0, 1, 5, 63}) {
      for (const bool accumulate : {false, true}) {
        const Tensor x = random_tensor({n, d}, 1, 2.0);
        const Tensor weight = random_tensor({d}, 2, 0.3, 1.0);
        const Tensor grad_out = random_tensor({n, d}, 3);
        const Tensor rstd = poisoned({n});
        rmsnorm_forward(Stream::cpu(), poisoned({n, d}), rstd, x, weight, kEps);
        const Tensor grad_weight = random_tensor({d}, 4);
        const Tensor start =
            accumulate ? random_tensor({n, d}, 5) : Tensor::zeros({n, d}, DType::kFloat32);
        const auto want = reference_backward<double>(start, grad_weight, grad_out, x, weight);
        const auto naive = reference_backward<float>(start, grad_weight, grad_out, x, weight);
        const Tensor grad_x = accumulate ? start : poisoned({n, d});
        rmsnorm_backward(Stream::cpu(), grad_x, grad_weight, grad_out, x, weight, rstd, accumulate);
        expect_close(grad_x, want.x, naive.x);
        expect_close(grad_weight, want.weight, naive.weight);
      }
    }
  }
}

TEST(RmsnormTest, GradientsMatchFiniteDifferences) {
  const int64_t n = 3;
  const int64_t d = 19;
  const Tensor x = random_tensor({n, d}, 1);
  const Tensor weight = random_tensor({d}, 2);
  const Tensor grad_out = random_tensor({n, d}, 3);
  const Tensor rstd = poisoned({n});
  const Tensor grad_x = poisoned({n, d});
  const Tensor grad_weight = Tensor::zeros({d}, DType::kFloat32);
  rmsnorm_forward(Stream::cpu(), poisoned({n, d}), rstd, x, weight, kEps);
  rmsnorm_backward(Stream::cpu(), grad_x, grad_weight, grad_out, x, weight, rstd);
  const std::vector<double> g = to_vector<double>(grad_out);
  const std::vector<double> at_x = to_vector<double>(x);
  const std::vector<double> at_weight = to_vector<double>(weight);
  expect_gradient(grad_x, finite_difference(
                              [&](const std::vector<double>& at) {
                                return dot(reference_forward(at, at_weight, n).out, g);
                              },
                              at_x));
  expect_gradient(grad_weight, finite_difference(
                                   [&](const std::vector<double>& at) {
                                     return dot(reference_forward(at_x, at, n).out, g);
                                   },
                                   at_weight));
}

// The query heads of a QKV buffer, normalised where they lie: bitwise what dense rows give, and
// nothing beside them is touched.
TEST(RmsnormTest, NormalisesHeadsInsideAWiderBuffer) {
  const int64_t n = 5;
  const int64_t heads = 3;
  const int64_t d = 17;
  const Strided x({n, heads, d}, 7, 7 + heads * d + 20);
  fill_random(x, 1);
  const Strided grad({n, heads, d}, 3, 100);
  fill_random(grad, 2);
  const Tensor weight = random_tensor({d}, 3);

  const Tensor dense_x = random_tensor({n * heads, d}, 1);
  const Tensor dense_grad = random_tensor({n * heads, d}, 2);
  const Tensor want = poisoned({n * heads, d});
  const Tensor want_rstd = poisoned({n * heads});
  const Tensor want_grad = poisoned({n * heads, d});
  const Tensor want_grad_weight = Tensor::zeros({d}, DType::kFloat32);
  rmsnorm_forward(Stream::cpu(), want, want_rstd, dense_x, weight, kEps);
  rmsnorm_backward(Stream::cpu(), want_grad, want_grad_weight, dense_grad, dense_x, weight,
                   want_rstd);

  const Tensor rstd = poisoned({n, heads});
  const Tensor grad_weight = Tensor::zeros({d}, DType::kFloat32);
  const Strided out({n, heads, d}, 0, 77);
  rmsnorm_forward(Stream::cpu(), out, rstd, x, weight, kEps);
  rmsnorm_backward(Stream::cpu(), grad, grad_weight, grad, x, weight, rstd);
  rmsnorm_forward(Stream::cpu(), x, rstd, x, weight, kEps);
  expect_same_bits(out.view(), want);
  expect_same_bits(x.view(), want);
  expect_same_bits(rstd, want_rstd);
  expect_same_bits(grad.view(), want_grad);
  expect_same_bits(grad_weight, want_grad_weight);
  x.expect_gaps_untouched();
  out.expect_gaps_untouched();
  grad.expect_gaps_untouched();
}

TEST(RmsnormTest, ThreadCountChangesNoBit) {
  const int64_t n = 301;
  const int64_t d = 129;
  const Tensor x = random_tensor({n, d}, 1);
  const Tensor weight = random_tensor({d}, 2);
  const Tensor grad_out = random_tensor({n, d}, 3);
  Tensor out[2], rstd[2], grad_x[2], grad_weight[2];
  for (const int run : {0, 1}) {
    const ThreadCount count(run == 0 ? 1 : 3);
    out[run] = poisoned({n, d});
    rstd[run] = poisoned({n});
    grad_x[run] = poisoned({n, d});
    grad_weight[run] = Tensor::zeros({d}, DType::kFloat32);
    rmsnorm_forward(Stream::cpu(), out[run], rstd[run], x, weight, kEps);
    rmsnorm_backward(Stream::cpu(), grad_x[run], grad_weight[run], grad_out, x, weight, rstd[run]);
  }
  expect_same_bits(out[0], out[1]);
  expect_same_bits(rstd[0], rstd[1]);
  expect_same_bits(grad_x[0], grad_x[1]);
  expect_same_bits(grad_weight[0], grad_weight[1]);
}

TEST(RmsnormDeathTest, RefusesOtherShapes) {
  const Tensor x = random_tensor({4, 8}, 1);
  const Tensor weight = random_tensor({7}, 2);
  EXPECT_DEATH(rmsnorm_forward(Stream::cpu(), poisoned({4, 8}), poisoned({4}), x, weight, kEps),
               "\\[7\\] for \\[4, 8\\]");
}

}  // namespace
}  // namespace muster
