#include "kernels/adamw/adamw.h"

#include "kernels/elementwise/elementwise.h"
#include "kernels/step_control/step_control.h"
#include "kernels/testing.h"

namespace muster {
namespace {

using namespace testing;

// What an update is told: its number, from 1, and what multiplies the gradients.
struct Update {
  AdamwOptions options;
  int64_t step = 1;
  double grad_scale = 1.0;

  // As decide_step leaves it.
  StepControl control() const {
    const auto n = static_cast<double>(step);
    return {.updates = step,
            .apply = 1,
            .grad_scale = static_cast<float>(grad_scale),
            .step_size = static_cast<float>(options.lr / (1 - std::pow(options.beta1, n))),
            .inverse_root_correction =
                static_cast<float>(1 / std::sqrt(1 - std::pow(options.beta2, n)))};
  }
};

ConstTensorView view_of(const StepControl& control) {
  return ConstTensorView(&control, DType::kUInt8, {sizeof(StepControl)});
}

template <typename T>
struct State {
  std::vector<T> weight, m, v;
};

// The header's formula, slow and obvious.
template <typename T>
void reference_step(State<T>& state, const std::vector<double>& grad,
                    const std::vector<AdamwSegment>& segments, const Update& update) {
  const AdamwOptions& options = update.options;
  const T correction1 = static_cast<T>(1 - std::pow(options.beta1, update.step));
  const T correction2 = static_cast<T>(1 - std::pow(options.beta2, update.step));
  for (const AdamwSegment& segment : segments) {
    for (int64_t i = segment.begin; i < segment.end; ++i) {
      const T g = static_cast<T>(grad[i]) * static_cast<T>(update.grad_scale);
      const T beta1 = static_cast<T>(options.beta1);
      const T beta2 = static_cast<T>(options.beta2);
      state.m[i] = beta1 * state.m[i] + (1 - beta1) * g;
      state.v[i] = beta2 * state.v[i] + (1 - beta2) * g * g;
      const T m_hat = state.m[i] / correction1;
      const T v_hat = state.v[i] / correction2;
      const T change = m_hat / (std::sqrt(v_hat) + static_cast<T>(options.eps)) +
                       static_cast<T>(segment.weight_decay) * state.weight[i];
      state.weight[i] -= static_cast<T>(options.lr) * change;
    }
  }
}

struct Tensors {
  Tensor weight, m, v, low;
  explicit Tensors(int64_t n)
      : weight(random_tensor({n}, 1)),
        m(Tensor::zeros({n}, DType::kFloat32)),
        v(Tensor::zeros({n}, DType::kFloat32)),
        low(Tensor::zeros({n}, DType::kBFloat16)) {}

  void step(const ConstTensorView& grad, const std::vector<AdamwSegment>& segments,
            const Update& update) const {
    alignas(16) const StepControl control = update.control();
    adamw_step(Stream::cpu(), weight, m, v, low, grad, view_of(control), segments, update.options);
  }
};

Update update_of(int64_t step) {
  return {.options = {.lr = 3e-3 / step, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8},
          .step = step,
          .grad_scale = 1.0 / 768};
}

TEST(AdamwTest, FollowsTheDoubleReferenceOverSteps) {
  for (const int64_t n : {1, 3, 17, 257, 5000, 20001}) {
    const std::vector<AdamwSegment> segments = {{0, n / 3, 0.1f}, {n / 3, n, 0.0f}};
    Tensors got(n);
    State<double> want{to_vector<double>(got.weight), std::vector<double>(n),
                       std::vector<double>(n)};
    State<float> naive{to_vector<float>(got.weight), std::vector<float>(n), std::vector<float>(n)};
    for (int64_t step = 1; step <= 20; ++step) {
      const Tensor grad = random_tensor({n}, 100 + step, 700.0, 50.0);
      const std::vector<double> g = to_vector<double>(grad);
      reference_step(want, g, segments, update_of(step));
      reference_step(naive, g, segments, update_of(step));
      got.step(grad, segments, update_of(step));
    }
    expect_close(got.weight, want.weight, naive.weight);
    expect_close(got.m, want.m, naive.m);
    expect_close(got.v, want.v, naive.v);
  }
}

std::vector<uint16_t> low_bits(const Tensor& low) {
  const auto* bits = static_cast<const uint16_t*>(low.view().raw());
  return std::vector<uint16_t>(bits, bits + low.numel());
}

TEST(AdamwTest, KeepsARoundedCopyOfTheWeights) {
  const int64_t n = 5003;
  const Tensors t(n);
  t.step(random_tensor({n}, 2), {{0, 7, 0.1f}, {7, n, 0.0f}}, update_of(1));
  const Tensor want({n}, DType::kBFloat16);
  copy_cast(Stream::cpu(), want, t.weight);
  EXPECT_EQ(low_bits(t.low), low_bits(want));
}

TEST(AdamwTest, ASkippedStepChangesNothing) {
  const int64_t n = 300;
  const Tensors t(n);
  const Tensors before(n);
  alignas(16) StepControl control = update_of(1).control();
  control.apply = 0;
  adamw_step(Stream::cpu(), t.weight, t.m, t.v, t.low, random_tensor({n}, 2), view_of(control),
             std::vector<AdamwSegment>{{0, n, 0.1f}}, {});
  expect_same_bits(t.weight, before.weight);
  expect_same_bits(t.m, before.m);
  expect_same_bits(t.v, before.v);
  EXPECT_EQ(low_bits(t.low), low_bits(before.low));
}

// The first update of a weight of zero is −lr · sign(g), whatever the gradient's size.
TEST(AdamwTest, FirstStepIsTheLearningRate) {
  const int64_t n = 5;
  Tensors t(n);
  fill_random(t.weight, 0, 0.0);
  Tensor grad({n}, DType::kFloat32);
  assign(grad, std::vector<double>{1e-3, -1e-3, 10.0, -1e8, 0.0});
  t.step(grad, {{0, n, 0.1f}}, {.options = {.lr = 0.01}});
  const std::vector<double> want = {-0.01, 0.01, -0.01, 0.01, 0.0};
  EXPECT_LE(max_error(to_vector<double>(t.weight), want), 2e-7);
}

// Decay alone over many steps: a factor rounded to float32 would drift away.
TEST(AdamwTest, SmallDecayDoesNotDrift) {
  const int64_t n = 64;
  Tensors t(n);
  const std::vector<double> start = to_vector<double>(t.weight);
  const Tensor grad = Tensor::zeros({n}, DType::kFloat32);
  const std::vector<AdamwSegment> segments = {{0, n, 0.1f}};
  constexpr int kSteps = 2000;
  for (int step = 1; step <= kSteps; ++step) {
    t.step(grad, segments, {.options = {.lr = 7e-5}, .step = step});
  }
  const std::vector<double> end = to_vector<double>(t.weight);
  double mean_ratio = 0.0;
  for (int64_t i = 0; i < n; ++i) mean_ratio += end[i] / start[i] / n;
  EXPECT_NEAR(mean_ratio, std::pow(1 - 7e-6, kSteps), 2e-5);
}

TEST(AdamwTest, LeavesElementsOutsideTheSegments) {
  const int64_t n = 300;
  Tensors t(n);
  const std::vector<float> before = to_vector<float>(t.weight);
  const Tensor grad = random_tensor({n}, 2);
  const std::vector<AdamwSegment> segments = {{3, 3, 0.1f}, {5, 40, 0.1f}, {250, 290, 0.0f}};
  t.step(grad, segments, {});
  for (int64_t i = 0; i < n; ++i) {
    const bool inside = (i >= 5 && i < 40) || (i >= 250 && i < 290);
    EXPECT_EQ(t.weight.data<float>()[i] != before[i], inside) << i;
    EXPECT_EQ(t.m.data<float>()[i] != 0.0f, inside) << i;
    EXPECT_EQ(t.v.data<float>()[i] != 0.0f, inside) << i;
    EXPECT_EQ(low_bits(t.low)[i] != 0, inside) << i;
  }
}

// An element's update does not depend on where its shard begins, nor on the number of threads.
TEST(AdamwTest, ShardsAndThreadsChangeNoBit) {
  const int64_t n = 20011;
  const Tensor grad = random_tensor({n}, 3);
  const std::vector<AdamwSegment> whole = {{0, n, 0.1f}};
  Tensors one(n);
  Tensors many(n);
  for (int64_t step = 1; step <= 3; ++step) {
    {
      const ThreadCount count(3);
      one.step(grad, whole, update_of(step));
    }
    const ThreadCount count(1);
    for (int64_t begin = 0, size = 1; begin < n; begin += size, size = size * 2 + 1) {
      const int64_t end = std::min(n, begin + size);
      alignas(16) const StepControl control = update_of(step).control();
      adamw_step(Stream::cpu(), many.weight.view().slice(begin, end),
                 many.m.view().slice(begin, end), many.v.view().slice(begin, end), {},
                 grad.view().slice(begin, end), view_of(control),
                 std::vector<AdamwSegment>{{0, end - begin, 0.1f}}, update_of(step).options);
    }
  }
  expect_same_bits(one.weight, many.weight);
  expect_same_bits(one.m, many.m);
  expect_same_bits(one.v, many.v);
}

TEST(AdamwDeathTest, RefusesSegmentsThatOverlap) {
  Tensors t(8);
  const Tensor grad = random_tensor({8}, 2);
  const std::vector<AdamwSegment> segments = {{0, 5, 0.1f}, {4, 8, 0.0f}};
  EXPECT_DEATH(t.step(grad, segments, {}), "4 to 8");
}

TEST(AdamwDeathTest, RefusesBfloat16MomentsOnTheCpu) {
  Tensors t(8);
  t.m = Tensor::zeros({8}, DType::kBFloat16);
  t.v = Tensor::zeros({8}, DType::kBFloat16);
  EXPECT_DEATH(t.step(random_tensor({8}, 2), {{0, 8, 0.1f}}, {}), "bfloat16");
}

}  // namespace
}  // namespace muster
