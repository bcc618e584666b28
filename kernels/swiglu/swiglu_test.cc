#include "kernels/swiglu/swiglu.h"

#include "kernels/testing.h"

namespace muster {
namespace {

using namespace testing;

template <typename T>
std::vector<T> reference_forward(const std::vector<T>& gate_up, int64_t n, int64_t f) {
  std::vector<T> out(n * f);
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t i = 0; i < f; ++i) {
      const T gate = gate_up[r * 2 * f + i];
      out[r * f + i] = gate / (1 + std::exp(-gate)) * gate_up[r * 2 * f + f + i];
    }
  }
  return out;
}

template <typename T>
std::vector<T> reference_backward(const std::vector<T>& grad_out, const std::vector<T>& gate_up,
                                  int64_t n, int64_t f) {
  std::vector<T> grad(2 * n * f);
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t i = 0; i < f; ++i) {
      const T gate = gate_up[r * 2 * f + i];
      const T up = gate_up[r * 2 * f + f + i];
      const T s = 1 / (1 + std::exp(-gate));
      grad[r * 2 * f + i] = grad_out[r * f + i] * up * s * (1 + gate * (1 - s));
      grad[r * 2 * f + f + i] = grad_out[r * f + i] * gate * s;
    }
  }
  return grad;
}

TEST(SwigluTest, MatchesTheReference) {
  for (const int64_t f : {1, 3, 17, 257}) {
    for (const int64_t n : {0, 1, 5, 63}) {
      const Tensor gate_up = random_tensor({n, 2 * f}, 1, 3.0);
      const Tensor grad_out = random_tensor({n, f}, 2);
      const Tensor out = poisoned({n, f});
      const Tensor grad = poisoned({n, 2 * f});
      swiglu_forward(Stream::cpu(), out, gate_up);
      swiglu_backward(Stream::cpu(), grad, grad_out, gate_up);
      expect_close(out, reference_forward(to_vector<double>(gate_up), n, f),
                   reference_forward(to_vector<float>(gate_up), n, f));
      expect_close(
          grad, reference_backward(to_vector<double>(grad_out), to_vector<double>(gate_up), n, f),
          reference_backward(to_vector<float>(grad_out), to_vector<float>(gate_up), n, f));
    }
  }
}

TEST(SwigluTest, AmaxIsRaised) {
  const Tensor gate_up = random_tensor({9, 14}, 1);
  const Tensor grad_out = random_tensor({9, 7}, 2);
  const Tensor out = poisoned({9, 7});
  const Tensor amax = Tensor::zeros({1}, DType::kFloat32);
  const auto largest = [](const Tensor& tensor) {
    float most = 0.0f;
    for (const float x : to_vector<float>(tensor.view())) most = std::max(most, std::abs(x));
    return most;
  };
  swiglu_forward(Stream::cpu(), out, gate_up, amax);
  EXPECT_EQ(amax.data<float>()[0], largest(out));
  amax.data<float>()[0] = 0.0f;
  swiglu_backward(Stream::cpu(), gate_up, grad_out, gate_up, amax);
  EXPECT_EQ(amax.data<float>()[0], largest(gate_up));
  amax.data<float>()[0] = 1e6f;
  swiglu_forward(Stream::cpu(), out, gate_up, amax);
  EXPECT_EQ(amax.data<float>()[0], 1e6f);
}

TEST(SwigluTest, GradientMatchesFiniteDifferences) {
  const int64_t n = 3;
  const int64_t f = 19;
  const Tensor gate_up = random_tensor({n, 2 * f}, 3);
  const Tensor grad_out = random_tensor({n, f}, 4);
  const Tensor grad = poisoned({n, 2 * f});
  swiglu_backward(Stream::cpu(), grad, grad_out, gate_up);
  const std::vector<double> g = to_vector<double>(grad_out);
  expect_gradient(
      grad, finite_difference(
                [&](const std::vector<double>& at) { return dot(reference_forward(at, n, f), g); },
                to_vector<double>(gate_up)));
}

TEST(SwigluTest, SaturatesFarFromZero) {
  Tensor gate_up({1, 4}, DType::kFloat32);
  assign(gate_up, std::vector<double>{-1e4, 1e4, 2.0, 3.0});
  Tensor grad_out({1, 2}, DType::kFloat32);
  assign(grad_out, std::vector<double>{1, 1});
  const Tensor out = poisoned({1, 2});
  const Tensor grad = poisoned({1, 4});
  swiglu_forward(Stream::cpu(), out, gate_up);
  swiglu_backward(Stream::cpu(), grad, grad_out, gate_up);
  EXPECT_EQ(to_vector<float>(out), (std::vector<float>{0.0f, 3e4f}));
  EXPECT_EQ(to_vector<float>(grad), (std::vector<float>{0.0f, 3.0f, 0.0f, 1e4f}));
}

TEST(SwigluTest, AliasesAndThreadsChangeNoBit) {
  const int64_t n = 101;
  const int64_t f = 257;
  const Tensor gate_up = random_tensor({n, 2 * f}, 5);
  const Tensor grad_out = random_tensor({n, f}, 6);
  const Tensor grad = poisoned({n, 2 * f});
  Tensor out[2] = {poisoned({n, f}), poisoned({n, f})};
  {
    const ThreadCount count(1);
    swiglu_forward(Stream::cpu(), out[0], gate_up);
    swiglu_backward(Stream::cpu(), grad, grad_out, gate_up);
  }
  const ThreadCount count(3);
  swiglu_forward(Stream::cpu(), out[1], gate_up);
  swiglu_backward(Stream::cpu(), gate_up, grad_out, gate_up);
  expect_same_bits(out[0], out[1]);
  expect_same_bits(grad, gate_up);
}

}  // namespace
}  // namespace muster
