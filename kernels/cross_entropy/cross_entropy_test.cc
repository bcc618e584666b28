#include "kernels/cross_entropy/cross_entropy.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/testing.h"

namespace muster {
namespace {

using ::muster::testing::assign;
using ::muster::testing::expect_close;
using ::muster::testing::expect_gradient;
using ::muster::testing::expect_same_bits;
using ::muster::testing::fill_random;
using ::muster::testing::finite_difference;
using ::muster::testing::poisoned;
using ::muster::testing::random_ints;
using ::muster::testing::random_tensor;
using ::muster::testing::Strided;
using ::muster::testing::ThreadCount;
using ::muster::testing::to_vector;

template <typename T>
struct Result {
  T loss = 0;
  std::vector<T> grad_hidden, grad_weight;
};

// All logits of a row at once. grad_weight starts from `before`.
template <typename T>
Result<T> reference(const std::vector<T>& hidden, const std::vector<T>& weight,
                    const Tensor& target, int64_t d, std::vector<T> before) {
  const int64_t n = target.numel();
  const int64_t vocabulary = static_cast<int64_t>(weight.size()) / d;
  Result<T> result{T(0), std::vector<T>(hidden.size(), T(0)), std::move(before)};
  for (int64_t i = 0; i < n; ++i) {
    const int32_t t = target.data<int32_t>()[i];
    if (t == -1) continue;
    std::vector<T> z(vocabulary, T(0));
    for (int64_t j = 0; j < vocabulary; ++j) {
      for (int64_t c = 0; c < d; ++c) z[j] += hidden[i * d + c] * weight[j * d + c];
    }
    const T top = *std::max_element(z.begin(), z.end());
    T sum = 0;
    for (const T x : z) sum += std::exp(x - top);
    result.loss += top + std::log(sum) - z[t];
    for (int64_t j = 0; j < vocabulary; ++j) {
      const T grad = std::exp(z[j] - top) / sum - (j == t ? T(1) : T(0));
      for (int64_t c = 0; c < d; ++c) {
        result.grad_hidden[i * d + c] += grad * weight[j * d + c];
        result.grad_weight[j * d + c] += grad * hidden[i * d + c];
      }
    }
  }
  return result;
}

Tensor zero_loss() {
  return Tensor::zeros({1}, DType::kFloat64);
}

struct Problem {
  std::string name;
  int64_t tokens, vocabulary, d;
  int64_t workspace_bytes = 4 << 20;
};

class CrossEntropyTest : public ::testing::TestWithParam<Problem> {};

TEST_P(CrossEntropyTest, MatchesTheReference) {
  const Problem& p = GetParam();
  Strided hidden({p.tokens, p.d}, 2, p.d + 5);
  Strided weight({p.vocabulary, p.d}, 1, p.d + 3);
  fill_random(hidden, 1);
  fill_random(weight, 2, 1.5);
  // From −1: some tokens are ignored.
  const Tensor targets =
      random_ints({p.tokens}, 3, -1, static_cast<int32_t>(std::min<int64_t>(p.vocabulary, 40)));
  Strided grad_hidden({p.tokens, p.d}, 3, p.d + 4);
  Strided grad_weight({p.vocabulary, p.d}, 0, p.d + 2);
  fill_random(grad_weight, 4);
  const auto want = reference(to_vector<double>(hidden), to_vector<double>(weight), targets, p.d,
                              to_vector<double>(grad_weight));
  const auto naive = reference(to_vector<float>(hidden), to_vector<float>(weight), targets, p.d,
                               to_vector<float>(grad_weight));

  const CrossEntropyOptions options{.workspace_bytes = p.workspace_bytes};
  const Tensor forward = zero_loss();
  const Tensor train = zero_loss();
  linear_cross_entropy_forward(Stream::cpu(), forward, hidden, weight, targets, options);
  linear_cross_entropy_train(Stream::cpu(), train, grad_hidden, grad_weight, hidden, weight,
                             targets, options);
  EXPECT_EQ(forward.data<double>()[0], train.data<double>()[0]);
  EXPECT_NEAR(forward.data<double>()[0], want.loss, 1e-6 * std::abs(want.loss));
  {
    SCOPED_TRACE("grad_hidden");
    expect_close(grad_hidden.view(), want.grad_hidden, naive.grad_hidden);
    grad_hidden.expect_gaps_untouched();
  }
  {
    SCOPED_TRACE("grad_weight");
    expect_close(grad_weight.view(), want.grad_weight, naive.grad_weight);
    grad_weight.expect_gaps_untouched();
  }
  // Overwriting equals adding to zeros.
  Strided first({p.vocabulary, p.d}, 0, p.d + 2);
  Strided added({p.vocabulary, p.d}, 0, p.d + 2);
  assign(added.view(), std::vector<float>(p.vocabulary * p.d, 0.0f));
  CrossEntropyOptions overwrite = options;
  overwrite.accumulate_weight = false;
  linear_cross_entropy_train(Stream::cpu(), zero_loss(), grad_hidden, first, hidden, weight,
                             targets, overwrite);
  linear_cross_entropy_train(Stream::cpu(), zero_loss(), grad_hidden, added, hidden, weight,
                             targets, options);
  expect_same_bits(first.view(), added.view());
  first.expect_gaps_untouched();
  // The loss accumulates.
  linear_cross_entropy_forward(Stream::cpu(), forward, hidden, weight, targets, options);
  EXPECT_NEAR(forward.data<double>()[0], 2 * want.loss, 1e-6 * std::abs(want.loss));
}

INSTANTIATE_TEST_SUITE_P(Problems, CrossEntropyTest,
                         ::testing::Values(Problem{"OneToken", 1, 7, 3},
                                           Problem{"OneWord", 5, 1, 4},
                                           Problem{"Bytes", 300, 257, 33},
                                           Problem{"SeveralBlocks", 1100, 48, 8},
                                           Problem{"NoTokens", 0, 5, 4},
                                           // Too large for the workspace: chunks, computed twice.
                                           Problem{"Chunks", 70, 1031, 17, 32 << 10},
                                           Problem{"ChunksLeaveOneColumn", 33, 129, 9, 4096},
                                           Problem{"ChunksAndBlocks", 150, 300, 16, 16 << 10}),
                         [](const auto& test) { return test.param.name; });

TEST(CrossEntropyGradientTest, MatchesFiniteDifferences) {
  const int64_t tokens = 6;
  const int64_t vocabulary = 21;
  const int64_t d = 5;
  const Tensor hidden = random_tensor({tokens, d}, 1);
  const Tensor weight = random_tensor({vocabulary, d}, 2);
  const Tensor targets = random_ints({tokens}, 3, -1, vocabulary);
  const Tensor loss = zero_loss();
  const Tensor grad_hidden = poisoned({tokens, d});
  const Tensor grad_weight = Tensor::zeros({vocabulary, d}, DType::kFloat32);
  linear_cross_entropy_train(Stream::cpu(), loss, grad_hidden, grad_weight, hidden, weight,
                             targets);
  const auto hidden0 = to_vector<double>(hidden);
  const auto weight0 = to_vector<double>(weight);
  const auto loss_of = [&](const auto& h, const auto& w) {
    return reference<double>(h, w, targets, d, std::vector<double>(w.size())).loss;
  };
  expect_gradient(grad_hidden,
                  finite_difference([&](auto x) { return loss_of(x, weight0); }, hidden0));
  expect_gradient(grad_weight,
                  finite_difference([&](auto x) { return loss_of(hidden0, x); }, weight0));
}

TEST(CrossEntropyEdgeTest, IgnoredTokensGetZeroGradientAndNoLoss) {
  const Tensor hidden = random_tensor({40, 8}, 1);
  const Tensor weight = random_tensor({30, 8}, 2);
  Tensor targets({40}, DType::kInt32);
  std::fill_n(targets.data<int32_t>(), 40, -100);
  const Tensor loss = zero_loss();
  const Tensor grad_hidden = poisoned({40, 8});
  const Tensor grad_weight = Tensor::zeros({30, 8}, DType::kFloat32);
  linear_cross_entropy_train(Stream::cpu(), loss, grad_hidden, grad_weight, hidden, weight, targets,
                             {.ignore_index = -100});
  EXPECT_EQ(loss.data<double>()[0], 0.0);
  for (int64_t i = 0; i < grad_hidden.numel(); ++i) ASSERT_EQ(grad_hidden.data<float>()[i], 0.0f);
  for (int64_t i = 0; i < grad_weight.numel(); ++i) ASSERT_EQ(grad_weight.data<float>()[i], 0.0f);
}

// Logits of ±200 overflow e^x: the softmax must subtract its maximum. And the guard must see NaNs.
TEST(CrossEntropyEdgeTest, LargeLogitsAndNaN) {
  const Tensor hidden = random_tensor({20, 4}, 1, 100.0);
  const Tensor weight = random_tensor({50, 4}, 2);
  const Tensor targets = random_ints({20}, 3, 0, 50);
  const Tensor loss = zero_loss();
  linear_cross_entropy_forward(Stream::cpu(), loss, hidden, weight, targets);
  const auto want = reference(to_vector<double>(hidden), to_vector<double>(weight), targets, 4,
                              std::vector<double>(200));
  EXPECT_NEAR(loss.data<double>()[0], want.loss, 1e-6 * want.loss);
  hidden.data<float>()[13] = testing::kPoison;
  linear_cross_entropy_forward(Stream::cpu(), loss, hidden, weight, targets);
  EXPECT_TRUE(std::isnan(loss.data<double>()[0]));
}

TEST(CrossEntropyThreadTest, ResultsDoNotDependOnThreads) {
  const Tensor hidden = random_tensor({700, 24}, 1);
  const Tensor weight = random_tensor({257, 24}, 2);
  const Tensor targets = random_ints({700}, 3, 0, 257);
  for (const int64_t workspace : {4 << 20, 64 << 10}) {
    std::vector<std::vector<Tensor>> runs;
    for (const int count : {1, 2, 3}) {
      const ThreadCount threads(count);
      runs.push_back({zero_loss(), poisoned({700, 24}), Tensor::zeros({257, 24}, DType::kFloat32)});
      linear_cross_entropy_train(Stream::cpu(), runs.back()[0], runs.back()[1], runs.back()[2],
                                 hidden, weight, targets, {.workspace_bytes = workspace});
      EXPECT_EQ(runs[0][0].data<double>()[0], runs.back()[0].data<double>()[0]);
      expect_same_bits(runs[0][1], runs.back()[1]);
      expect_same_bits(runs[0][2], runs.back()[2]);
    }
  }
}

TEST(CrossEntropyDeathTest, TargetOutsideTheVocabulary) {
  const Tensor hidden = random_tensor({2, 3}, 1);
  const Tensor weight = random_tensor({4, 3}, 2);
  const Tensor targets = testing::int_tensor({0, 4});
  const Tensor loss = zero_loss();
  EXPECT_DEATH(linear_cross_entropy_forward(Stream::cpu(), loss, hidden, weight, targets),
               "target 4 of token 1");
}

}  // namespace
}  // namespace muster
