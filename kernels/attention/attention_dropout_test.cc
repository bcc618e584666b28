// The mask by itself, and as attention applies it.
#include <gtest/gtest.h>

#include "kernels/attention/attention_testing.h"

namespace muster {
namespace {

using namespace testing;

TEST(DropoutMaskTest, DropsAtItsRateAndIndependently) {
  constexpr int64_t kQueries = 300;
  constexpr int64_t kHeads = 3;
  constexpr int64_t kKeys = 300;
  for (const float p : {0.02f, 0.3f, 0.5f, 0.9f}) {
    const DropoutMask mask(p, 11, 0);
    // Dropped, and dropped beside a dropped neighbour: next key, next query, next head.
    std::array<double, 4> dropped{};
    for (int64_t i = 0; i < kQueries; ++i) {
      for (int64_t head = 0; head < kHeads; ++head) {
        for (int64_t j = 0; j < kKeys; ++j) {
          if (mask.keeps(i, head, j)) continue;
          dropped[0] += 1.0;
          dropped[1] += !mask.keeps(i, head, j + 1);
          dropped[2] += !mask.keeps(i + 1, head, j);
          dropped[3] += !mask.keeps(i, head + 1, j);
        }
      }
    }
    const auto expect_rate = [&](double count, double rate) {
      const double n = kQueries * kHeads * kKeys;
      EXPECT_NEAR(count, n * rate, 5.0 * std::sqrt(n * rate * (1.0 - rate))) << p;
    };
    expect_rate(dropped[0], p);
    // Pairs overlap, which no more than doubles the variance of their number.
    for (int i = 1; i < 4; ++i) {
      const double n = kQueries * kHeads * kKeys;
      EXPECT_NEAR(dropped[i], n * p * p, 5.0 * std::sqrt(3.0 * n * p * p)) << p << " " << i;
    }
  }
}

TEST(DropoutMaskTest, IsTheDocumentedFunctionOfItsKey) {
  const DropoutMask mask(0.25f, 42, 1000);
  const CounterRng rng(42, RandomPurpose::kDropout, 0);
  std::vector<float> factors(37);
  for (const int64_t query : {0, 5, 70000}) {
    for (const int64_t head : {0, 7}) {
      mask.factors(factors.data(), query, head, 3, 37);
      for (int64_t j = 0; j < 37; ++j) {
        const uint64_t key = 1003 + static_cast<uint64_t>(j);
        const PhiloxBlock block = rng.with_stream(1000 + static_cast<uint64_t>(query))
                                      .block(key / 4 << 16 | static_cast<uint64_t>(head));
        const bool kept = block.word[key % 4] >= 0x40000000u;
        EXPECT_EQ(mask.keeps(query, head, j + 3), kept);
        EXPECT_EQ(factors[j], kept ? 1.0f / 0.75f : 0.0f);
      }
    }
  }
}

TEST(DropoutMaskTest, OtherKeysGiveOtherMasks) {
  const DropoutMask mask(0.5f, 1, 0);
  for (const DropoutMask& other : {DropoutMask(0.5f, 2, 0), DropoutMask(0.5f, 1, 1),
                                   DropoutMask(0.5f, uint64_t{1} << 32 | 1, 0)}) {
    int64_t differ = 0;
    for (int64_t i = 0; i < 10000; ++i) {
      differ += mask.keeps(i / 100, 0, i % 100) != other.keeps(i / 100, 0, i % 100);
    }
    EXPECT_NEAR(differ, 5000, 300);
  }
}

TEST(AttentionDropoutTest, AppliesTheMaskWhateverTheTilesSegmentsAndThreads) {
  AttentionCase c{.heads_q = 2, .heads_k = 2, .width = 201};
  const AttentionOptions options{.causal = false, .dropout = 0.4f, .dropout_seed = 9};
  const DropoutMask mask(options.dropout, options.dropout_seed, 0);
  const std::vector<std::vector<int32_t>> packings{{0, 201}, {0, 67, 68, 201}, {0, 3, 200, 201}};
  for (const std::vector<int32_t>& ends : packings) {
    c.ends_q = c.ends_k = ends;
    for (const int threads : {1, 3}) {
      const ThreadCount count(threads);
      const AttentionOperands x(c, host_allocator());
      x.fill_one_hot();
      x.forward(Stream::cpu(), options);
      x.backward(Stream::cpu(), options);
      const std::vector<float> out = AttentionOperands::read(x.out);
      const std::vector<float> grad_v = AttentionOperands::read(x.grad_v);
      for (size_t s = 0; s + 1 < ends.size(); ++s) {
        for (int64_t i = ends[s]; i < ends[s + 1]; ++i) {
          for (int64_t head = 0; head < c.heads_q; ++head) {
            for (int64_t j = 0; j < c.width; ++j) {
              const bool here = j >= ends[s] && j < ends[s + 1];
              const bool kept = here && mask.keeps(i, head, j);
              ASSERT_EQ(out[(i * c.heads_q + head) * c.width + j] != 0.0f, kept) << i << " " << j;
              ASSERT_EQ(grad_v[(j * c.heads_k + head) * c.width + i] != 0.0f, kept)
                  << i << " " << j;
            }
          }
        }
      }
    }
  }
}

// The second half of a batch by itself, with its offset, gives the bits that the whole gives.
TEST(AttentionDropoutTest, PartsOfABatchGiveTheSameBits) {
  const AttentionCase whole{.ends_q = {0, 50, 130}, .ends_k = {0, 50, 130}, .heads_q = 2};
  const AttentionOperands x(whole, host_allocator());
  x.fill();
  AttentionOptions options{.dropout = 0.3f, .dropout_seed = 4};
  x.forward(Stream::cpu(), options);
  x.backward(Stream::cpu(), options);

  const Tensor cu = int_tensor({0, 80});
  const Segments segments{cu, cu, 80, 80};
  const auto part = [](const TensorView& view) { return view.slice(50, 130); };
  const Tensor out = poisoned({80, 2, 8});
  const Tensor lse = poisoned({2, 80});
  const Tensor grad_q = poisoned({80, 2, 8});
  const Tensor grad_k = poisoned({80, 1, 8});
  const Tensor grad_v = poisoned({80, 1, 8});
  options.dropout_offset = 50;
  attention_forward(Stream::cpu(), out, lse, part(x.q), part(x.k), part(x.v), segments, options);
  attention_backward(Stream::cpu(), grad_q, grad_k, grad_v, part(x.grad_out), part(x.q), part(x.k),
                     part(x.v), out, lse, segments, options);
  expect_same_bits(out, part(x.out));
  expect_same_bits(grad_q, part(x.grad_q));
  expect_same_bits(grad_k, part(x.grad_k));
  expect_same_bits(grad_v, part(x.grad_v));
}

TEST(AttentionDropoutTest, LseIsThatWithoutDropout) {
  const AttentionCase c{.ends_q = {0, 90}, .ends_k = {0, 90}};
  const AttentionOperands with(c, host_allocator());
  const AttentionOperands without(c, host_allocator());
  with.fill();
  without.fill();
  with.forward(Stream::cpu(), {.dropout = 0.5f});
  without.forward(Stream::cpu(), {});
  expect_same_bits(with.lse, without.lse);
}

}  // namespace
}  // namespace muster
