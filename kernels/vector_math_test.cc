#include "kernels/vector_math.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace muster::cpu {
namespace {

// |got − e^x| in units in the last place of the float nearest to e^x.
double error_in_ulp(float got, float x) {
  const double want = std::exp(static_cast<double>(x));
  const float nearest = static_cast<float>(want);
  const float above = std::nextafter(nearest, std::numeric_limits<float>::infinity());
  return std::abs(got - want) / (static_cast<double>(above) - nearest);
}

MUSTER_SIMD_CLONES void exp_loop(float* out, const float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = fast_exp(x[i]);
}

TEST(VectorMathTest, ExpIsAccurateOverTheWholeRange) {
  std::vector<float> x;
  for (double v = -103.0; v < 88.7; v += 0.00171) x.push_back(static_cast<float>(v));
  std::vector<float> loop(x.size());
  exp_loop(loop.data(), x.data(), static_cast<int64_t>(x.size()));
  double worst = 0.0;
  for (size_t i = 0; i < x.size(); ++i) {
    worst = std::max(worst, error_in_ulp(loop[i], x[i]));
  }
  EXPECT_LE(worst, 1.5);
}

TEST(VectorMathTest, ExpAtTheEdges) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(fast_exp(0.0f), 1.0f);
  EXPECT_EQ(fast_exp(-kInfinity), 0.0f);
  EXPECT_EQ(fast_exp(-1e30f), 0.0f);
  EXPECT_EQ(fast_exp(kInfinity), kInfinity);
  EXPECT_EQ(fast_exp(89.0f), kInfinity);
  EXPECT_TRUE(std::isnan(fast_exp(std::numeric_limits<float>::quiet_NaN())));
}

TEST(VectorMathTest, SoftmaxExpIsExpAboveItsFloor) {
  double worst = 0.0;
  for (float x = -60.0f; x < 88.0f; x += 0.0173f) {
    worst = std::max(worst, error_in_ulp(softmax_exp(broadcast(x))[3], x));
  }
  EXPECT_LE(worst, 1.5);
  EXPECT_EQ(softmax_exp(Vec{})[0], 1.0f);
  EXPECT_EQ(softmax_exp(broadcast(-1e30f))[0], softmax_exp(broadcast(-60.0f))[0]);
  EXPECT_TRUE(std::isnan(softmax_exp(broadcast(std::numeric_limits<float>::quiet_NaN()))[0]));
  EXPECT_TRUE(std::isnan(softmax_exp(broadcast(-std::numeric_limits<float>::quiet_NaN()))[0]));
}

TEST(VectorMathTest, TanhIsAccurateForSmallAndLarge) {
  double worst = 0.0;
  const auto check = [&](float x) {
    const double want = std::tanh(static_cast<double>(x));
    const auto nearest = static_cast<float>(std::abs(want));
    const double unit = nearest - static_cast<double>(std::nextafter(nearest, 0.0f));
    worst = std::max(worst, std::abs(fast_tanh(broadcast(x))[7] - want) / unit);
  };
  for (float x = 1e-30f; x < 60.0f; x *= 1.0037f) {
    check(x);
    check(-x);
  }
  EXPECT_LE(worst, 4.0);
  EXPECT_EQ(fast_tanh(Vec{})[0], 0.0f);
  EXPECT_EQ(fast_tanh(broadcast(1e30f))[0], 1.0f);
  EXPECT_EQ(fast_tanh(broadcast(-1e30f))[0], -1.0f);
  EXPECT_TRUE(std::isnan(fast_tanh(broadcast(std::numeric_limits<float>::quiet_NaN()))[0]));
}

TEST(VectorMathTest, MaxAndChoice) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float a : {-kInfinity, -3.0f, 0.0f, 1e-40f, 2.0f, 3e38f, kInfinity}) {
    for (const float b : {-kInfinity, -3.0f, 0.0f, 1e-40f, 2.0f, 3e38f, kInfinity}) {
      EXPECT_EQ(max(broadcast(a), broadcast(b))[5], std::max(a, b)) << a << " and " << b;
    }
  }
  for (const int count : {-40, 0, 1, 7, 16, 90}) {
    const Vec v = choose_first(count, broadcast(1.0f), broadcast(kInfinity));
    for (int lane = 0; lane < kLanes; ++lane) EXPECT_EQ(v[lane], lane < count ? 1.0f : kInfinity);
  }
}

TEST(VectorMathTest, SigmoidSaturates) {
  EXPECT_EQ(fast_sigmoid(0.0f), 0.5f);
  EXPECT_EQ(fast_sigmoid(200.0f), 1.0f);
  EXPECT_EQ(fast_sigmoid(-200.0f), 0.0f);
  EXPECT_NEAR(fast_sigmoid(1.5f), 1.0 / (1.0 + std::exp(-1.5)), 1e-7);
}

TEST(VectorMathTest, ReductionsSeeEveryLane) {
  for (int lane = 0; lane < kLanes; ++lane) {
    Vec v = broadcast(-2.0f);
    v[lane] = 5.0f;
    EXPECT_EQ(reduce_max(v), 5.0f);
    EXPECT_EQ(reduce_add(v), -2.0f * 15 + 5.0f);
  }
}

}  // namespace
}  // namespace muster::cpu
