// The whole contract at random: windows, caps, dropout, dtypes, strides and segments together.
#include <gtest/gtest.h>

#include "kernels/attention/attention_testing.h"

namespace muster {
namespace {

using namespace testing;

class AttentionRandomTest : public ::testing::TestWithParam<int> {};

constexpr int kCasesPerTest = 30;

TEST_P(AttentionRandomTest, MatchesTheReference) {
  for (int i = 0; i < kCasesPerTest; ++i) {
    const AttentionCase c = random_attention_case(GetParam() * kCasesPerTest + i);
    const AttentionOperands operands(c, host_allocator());
    operands.fill();
    operands.forward(Stream::cpu(), c.options);
    operands.backward(Stream::cpu(), c.options);
    expect_attention(c, result_of(operands), operands);
    operands.expect_gaps_untouched();
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionRandomTest, ::testing::Range(0, 8));

// What the random cases are there for is among them.
TEST(AttentionCaseTest, TheCasesCoverTheContract) {
  int64_t windows = 0, wide = 0, caps = 0, drops = 0, empty = 0, single = 0, cross = 0, grouped = 0,
          packed = 0, halves = 0;
  for (int i = 0; i < 8 * kCasesPerTest; ++i) {
    const AttentionCase c = random_attention_case(i);
    windows += c.options.causal && c.options.window_left >= 0 && c.options.window_left < 200;
    wide += c.options.window_left > 1000;
    caps += c.options.logit_cap > 0.0f;
    drops += c.options.dropout > 0.0f;
    for (size_t s = 1; s < c.ends_q.size(); ++s) {
      empty += c.ends_q[s] == c.ends_q[s - 1];
      single += c.ends_q[s] == c.ends_q[s - 1] + 1;
    }
    cross += c.ends_q != c.ends_k;
    grouped += c.heads_k > 1 && c.heads_q > c.heads_k;
    packed += c.packed;
    halves += c.dtype == DType::kFloat16;
  }
  for (const int64_t count :
       {windows, wide, caps, drops, empty, single, cross, grouped, packed, halves}) {
    EXPECT_GE(count, 15);
  }
}

// Gradients of float32 attention against differences of the float64 reference.
void expect_gradients(const AttentionOptions& options) {
  const AttentionCase c{.ends_q = {0, 3, 10},
                        .ends_k = {0, 5, 11},
                        .heads_q = 2,
                        .heads_k = 1,
                        .width = 3,
                        .options = options};
  const AttentionOperands operands(c, host_allocator());
  operands.fill();
  operands.forward(Stream::cpu(), c.options);
  operands.backward(Stream::cpu(), c.options);
  const auto values = [](const ConstTensorView& view) { return to_vector<double>(view); };
  const AttentionInputs<double> inputs{values(operands.q), values(operands.k), values(operands.v),
                                       values(operands.grad_out)};
  const auto differences = [&](std::vector<double> AttentionInputs<double>::*input) {
    const auto loss = [&](const std::vector<double>& x) {
      AttentionInputs<double> moved = inputs;
      moved.*input = x;
      return dot(reference_attention(c, moved).out, inputs.grad_out);
    };
    return finite_difference(loss, inputs.*input);
  };
  expect_gradient(operands.grad_q, differences(&AttentionInputs<double>::q));
  expect_gradient(operands.grad_k, differences(&AttentionInputs<double>::k));
  expect_gradient(operands.grad_v, differences(&AttentionInputs<double>::v));
}

TEST(AttentionFiniteDifferenceTest, Window) {
  expect_gradients({.window_left = 2});
  expect_gradients({.causal = false, .window_left = 1, .window_right = 2});
  expect_gradients({.causal = false, .window_left = 0, .window_right = 0});
}

TEST(AttentionFiniteDifferenceTest, Cap) {
  expect_gradients({.logit_cap = 1.5f});
  expect_gradients({.causal = false, .logit_cap = 0.3f});
}

TEST(AttentionFiniteDifferenceTest, Dropout) {
  expect_gradients({.dropout = 0.4f, .dropout_seed = 3});
}

TEST(AttentionFiniteDifferenceTest, AllTogether) {
  expect_gradients({.scale = 0.7f,
                    .causal = false,
                    .window_left = 3,
                    .window_right = 1,
                    .logit_cap = 1.0f,
                    .dropout = 0.3f,
                    .dropout_seed = 5,
                    .dropout_offset = 77});
}

// A window that bounds nothing, and causality said as a window, change no bit.
TEST(AttentionWindowTest, SaysTheSameInOtherWords) {
  const AttentionCase c{.ends_q = {0, 70, 71, 200}, .ends_k = {0, 70, 71, 200}, .width = 16};
  const auto run = [&](const AttentionOptions& options) {
    AttentionOperands operands(c, host_allocator());
    operands.fill();
    operands.forward(Stream::cpu(), options);
    operands.backward(Stream::cpu(), options);
    return operands;
  };
  const auto expect_same = [&](const AttentionOptions& a, const AttentionOptions& b) {
    const AttentionOperands x = run(a);
    const AttentionOperands y = run(b);
    expect_same_bits(x.out, y.out);
    expect_same_bits(x.lse, y.lse);
    expect_same_bits(x.grad_q, y.grad_q);
    expect_same_bits(x.grad_k, y.grad_k);
    expect_same_bits(x.grad_v, y.grad_v);
  };
  expect_same({.causal = true}, {.causal = false, .window_right = 0});
  expect_same({.causal = true}, {.causal = true, .window_left = 128, .window_right = 5});
  expect_same({.causal = false}, {.causal = false, .window_left = 128, .window_right = 1 << 20});
}

}  // namespace
}  // namespace muster
