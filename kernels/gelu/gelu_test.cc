#include "kernels/gelu/gelu.h"

#include "kernels/testing.h"

namespace muster {
namespace {

using namespace testing;

template <typename T>
std::vector<T> reference_forward(std::vector<T> x) {
  for (T& v : x) {
    const T u =
        static_cast<T>(std::sqrt(2 / std::acos(-1.0))) * (v + static_cast<T>(0.044715) * v * v * v);
    v = v / 2 * (1 + std::tanh(u));
  }
  return x;
}

template <typename T>
std::vector<T> reference_backward(const std::vector<T>& grad_out, const std::vector<T>& x) {
  std::vector<T> grad(x.size());
  const T c = static_cast<T>(std::sqrt(2 / std::acos(-1.0)));
  for (size_t i = 0; i < x.size(); ++i) {
    const T v = x[i];
    const T t = std::tanh(c * (v + static_cast<T>(0.044715) * v * v * v));
    const T slope = c * (1 + static_cast<T>(3 * 0.044715) * v * v);
    grad[i] = grad_out[i] * ((1 + t) / 2 + v / 2 * (1 - t * t) * slope);
  }
  return grad;
}

TEST(GeluTest, MatchesTheReference) {
  for (const int64_t d : {1, 3, 17, 257}) {
    for (const int64_t n : {0, 1, 5, 63}) {
      const Tensor x = random_tensor({n, d}, 1, 3.0);
      const Tensor grad_out = random_tensor({n, d}, 2);
      const Tensor out = poisoned({n, d});
      const Tensor grad_x = poisoned({n, d});
      gelu_forward(Stream::cpu(), out, x);
      gelu_backward(Stream::cpu(), grad_x, grad_out, x);
      expect_close(out, reference_forward(to_vector<double>(x)),
                   reference_forward(to_vector<float>(x)));
      expect_close(grad_x, reference_backward(to_vector<double>(grad_out), to_vector<double>(x)),
                   reference_backward(to_vector<float>(grad_out), to_vector<float>(x)));
    }
  }
}

TEST(GeluTest, GradientMatchesFiniteDifferences) {
  const Tensor x = random_tensor({37}, 3, 2.0);
  const Tensor grad_out = random_tensor({37}, 4);
  const Tensor grad_x = poisoned({37});
  gelu_backward(Stream::cpu(), grad_x, grad_out, x);
  const std::vector<double> g = to_vector<double>(grad_out);
  expect_gradient(grad_x,
                  finite_difference(
                      [&](const std::vector<double>& at) { return dot(reference_forward(at), g); },
                      to_vector<double>(x)));
}

TEST(GeluTest, SaturatesFarFromZero) {
  Tensor x({4}, DType::kFloat32);
  assign(x, std::vector<double>{-1e4, -30.0, 30.0, 1e4});
  Tensor grad_out({4}, DType::kFloat32);
  assign(grad_out, std::vector<double>{1, 1, 1, 1});
  const Tensor out = poisoned({4});
  const Tensor grad_x = poisoned({4});
  gelu_forward(Stream::cpu(), out, x);
  gelu_backward(Stream::cpu(), grad_x, grad_out, x);
  EXPECT_EQ(to_vector<float>(out), (std::vector<float>{0.0f, 0.0f, 30.0f, 1e4f}));
  EXPECT_EQ(to_vector<float>(grad_x), (std::vector<float>{0.0f, 0.0f, 1.0f, 1.0f}));
}

TEST(GeluTest, AliasesAndThreadsChangeNoBit) {
  const int64_t n = 20011;
  const Tensor x = random_tensor({n}, 5);
  const Tensor grad = random_tensor({n}, 6);
  const Tensor out = poisoned({n});
  const Tensor grad_x = poisoned({n});
  {
    const ThreadCount count(1);
    gelu_forward(Stream::cpu(), out, x);
    gelu_backward(Stream::cpu(), grad_x, grad, x);
  }
  const ThreadCount count(3);
  gelu_backward(Stream::cpu(), grad, grad, x);
  gelu_forward(Stream::cpu(), x, x);
  expect_same_bits(out, x);
  expect_same_bits(grad_x, grad);
}

}  // namespace
}  // namespace muster
