#include "kernels/attention/attention.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "kernels/testing.h"

namespace muster {
namespace {

using ::muster::testing::expect_close;
using ::muster::testing::expect_gradient;
using ::muster::testing::expect_same_bits;
using ::muster::testing::fill_random;
using ::muster::testing::finite_difference;
using ::muster::testing::int_tensor;
using ::muster::testing::poisoned;
using ::muster::testing::random_tensor;
using ::muster::testing::Strided;
using ::muster::testing::ThreadCount;
using ::muster::testing::to_vector;

struct Problem {
  std::string name;
  std::vector<int32_t> cu_q;
  std::vector<int32_t> cu_k;
  int64_t q_heads = 1;
  int64_t k_heads = 1;
  int64_t d = 8;
  bool causal = true;
  float scale = 0.0f;

  int64_t nq() const { return cu_q.back(); }
  int64_t nk() const { return cu_k.back(); }
};

// Longest segment.
int64_t longest(const std::vector<int32_t>& edges) {
  int32_t most = 0;
  for (size_t i = 1; i < edges.size(); ++i) most = std::max(most, edges[i] - edges[i - 1]);
  return most;
}

template <typename T>
struct Result {
  std::vector<T> out, lse, grad_q, grad_k, grad_v;
};

// Whole rows of scores, softmax as written in the text book, and its gradients.
template <typename T>
Result<T> reference(const Problem& p, const std::vector<T>& q, const std::vector<T>& k,
                    const std::vector<T>& v, const std::vector<T>& grad_out) {
  const int64_t d = p.d;
  Result<T> result{std::vector<T>(q.size(), T(0)),
                   std::vector<T>(p.q_heads * p.nq(), -std::numeric_limits<T>::infinity()),
                   std::vector<T>(q.size(), T(0)), std::vector<T>(k.size(), T(0)),
                   std::vector<T>(v.size(), T(0))};
  const T scale = p.scale != 0 ? T(p.scale) : T(1) / std::sqrt(T(d));
  for (size_t s = 0; s + 1 < p.cu_q.size(); ++s) {
    const int64_t q_count = p.cu_q[s + 1] - p.cu_q[s];
    const int64_t k_count = p.cu_k[s + 1] - p.cu_k[s];
    for (int64_t head = 0; head < p.q_heads; ++head) {
      const int64_t k_head = head / (p.q_heads / p.k_heads);
      for (int64_t i = 0; i < q_count; ++i) {
        const int64_t seen = p.causal ? std::max<int64_t>(0, i + k_count - q_count + 1) : k_count;
        if (seen == 0) continue;
        const int64_t row = ((p.cu_q[s] + i) * p.q_heads + head) * d;
        const auto k_row = [&](int64_t j) { return ((p.cu_k[s] + j) * p.k_heads + k_head) * d; };
        std::vector<T> score(seen);
        for (int64_t j = 0; j < seen; ++j) {
          for (int64_t c = 0; c < d; ++c) score[j] += q[row + c] * k[k_row(j) + c];
          score[j] *= scale;
        }
        const T top = *std::max_element(score.begin(), score.end());
        T sum = 0;
        for (const T x : score) sum += std::exp(x - top);
        result.lse[head * p.nq() + p.cu_q[s] + i] = top + std::log(sum);
        T delta = 0;
        std::vector<T> probability(seen), grad(seen);
        for (int64_t j = 0; j < seen; ++j) {
          probability[j] = std::exp(score[j] - top) / sum;
          for (int64_t c = 0; c < d; ++c) {
            result.out[row + c] += probability[j] * v[k_row(j) + c];
            grad[j] += grad_out[row + c] * v[k_row(j) + c];
            result.grad_v[k_row(j) + c] += probability[j] * grad_out[row + c];
          }
          delta += probability[j] * grad[j];
        }
        for (int64_t j = 0; j < seen; ++j) {
          const T grad_score = probability[j] * (grad[j] - delta) * scale;
          for (int64_t c = 0; c < d; ++c) {
            result.grad_q[row + c] += grad_score * k[k_row(j) + c];
            result.grad_k[k_row(j) + c] += grad_score * q[row + c];
          }
        }
      }
    }
  }
  return result;
}

Segments segments_of(const Problem& p, const Tensor& cu_q, const Tensor& cu_k) {
  return {cu_q, cu_k, longest(p.cu_q), longest(p.cu_k)};
}

class AttentionTest : public ::testing::TestWithParam<Problem> {};

TEST_P(AttentionTest, MatchesTheReferenceThroughStridedViews) {
  const Problem& p = GetParam();
  const Shape q_shape{p.nq(), p.q_heads, p.d};
  const Shape k_shape{p.nk(), p.k_heads, p.d};
  const int64_t q_width = p.q_heads * p.d;
  const int64_t k_width = p.k_heads * p.d;
  Strided q(q_shape, 3, q_width + 2 * k_width + 5);
  Strided k(k_shape, 1, k_width + 4);
  Strided v(k_shape, 2, 2 * k_width + 3);
  Strided grad_out(q_shape, 0, q_width + 1);
  Strided out(q_shape, 5, q_width + 7);
  fill_random(q, 1);
  fill_random(k, 2);
  fill_random(v, 3);
  fill_random(grad_out, 4);
  const Tensor lse = poisoned({p.q_heads, p.nq()});
  const Tensor cu_q = int_tensor(p.cu_q);
  const Tensor cu_k = int_tensor(p.cu_k);
  const Segments segments = segments_of(p, cu_q, cu_k);
  const AttentionOptions options{.scale = p.scale, .causal = p.causal};

  attention_forward(Stream::cpu(), out, lse, q, k, v, segments, options);
  Strided grad_q(q_shape, 1, q_width + 2);
  Strided grad_k(k_shape, 2, k_width + 9);
  Strided grad_v(k_shape, 3, k_width + 3);
  attention_backward(Stream::cpu(), grad_q, grad_k, grad_v, grad_out, q, k, v, out, lse, segments,
                     options);

  const auto want = reference<double>(p, to_vector<double>(q), to_vector<double>(k),
                                      to_vector<double>(v), to_vector<double>(grad_out));
  const auto naive = reference<float>(p, to_vector<float>(q), to_vector<float>(k),
                                      to_vector<float>(v), to_vector<float>(grad_out));
  {
    SCOPED_TRACE("out");
    expect_close(out.view(), want.out, naive.out);
    out.expect_gaps_untouched();
  }
  {
    SCOPED_TRACE("lse");
    expect_close(lse, want.lse, naive.lse);
  }
  // The gradients cancel grad p against grad out · out, which here come by different roundings.
  {
    SCOPED_TRACE("grad_q");
    expect_close(grad_q.view(), want.grad_q, naive.grad_q, 8.0);
    grad_q.expect_gaps_untouched();
  }
  {
    SCOPED_TRACE("grad_k");
    expect_close(grad_k.view(), want.grad_k, naive.grad_k, 8.0);
    grad_k.expect_gaps_untouched();
  }
  {
    SCOPED_TRACE("grad_v");
    expect_close(grad_v.view(), want.grad_v, naive.grad_v, 8.0);
    grad_v.expect_gaps_untouched();
  }
}

INSTANTIATE_TEST_SUITE_P(
    Problems, AttentionTest,
    ::testing::Values(
        Problem{"OneToken", {0, 1}, {0, 1}}, Problem{"Tails", {0, 131}, {0, 131}, 2, 2, 19},
        Problem{"TailsBidirectional", {0, 77}, {0, 77}, 2, 2, 33, false},
        Problem{"WholeTiles", {0, 128}, {0, 128}, 1, 1, 32},
        Problem{"Grouped", {0, 70}, {0, 70}, 6, 2, 16},
        Problem{"MultiQuery", {0, 66}, {0, 66}, 3, 1, 48, true, 0.37f},
        Problem{"HeadOfOne", {0, 20}, {0, 20}, 2, 1, 1},
        Problem{"WideHead", {0, 67}, {0, 67}, 1, 1, 100},
        Problem{"Documents", {0, 1, 1, 90, 155, 156}, {0, 1, 1, 90, 155, 156}, 2, 1, 24},
        // One new query against a cache, a chunk of queries in the middle, and a long one.
        Problem{"FewerQueries", {0, 1, 8, 78}, {0, 75, 205, 290}, 2, 2, 16},
        // Queries before the first key see nothing, also whole tiles of them.
        Problem{"FewerKeys", {0, 9, 159, 164}, {0, 4, 24, 24}, 2, 1, 16},
        Problem{"FewerKeysBidirectional", {0, 9, 90, 95}, {0, 4, 24, 24}, 1, 1, 16, false},
        Problem{"KeysWithoutQueries", {0, 0, 5}, {0, 7, 12}, 1, 1, 8},
        Problem{"Nothing", {0, 0}, {0, 0}},
        Problem{"LargeScores", {0, 90}, {0, 90}, 1, 1, 64, true, 8.0f}),
    [](const auto& test) { return test.param.name; });

TEST(AttentionGradientTest, MatchesFiniteDifferences) {
  const Problem p{"", {0, 3, 10}, {0, 5, 11}, 2, 1, 3};
  const Tensor q = random_tensor({p.nq(), p.q_heads, p.d}, 1);
  const Tensor k = random_tensor({p.nk(), p.k_heads, p.d}, 2);
  const Tensor v = random_tensor({p.nk(), p.k_heads, p.d}, 3);
  const Tensor grad_out = random_tensor({p.nq(), p.q_heads, p.d}, 4);
  const Tensor cu_q = int_tensor(p.cu_q);
  const Tensor cu_k = int_tensor(p.cu_k);
  const Tensor out = poisoned(q.shape());
  const Tensor lse = poisoned({p.q_heads, p.nq()});
  attention_forward(Stream::cpu(), out, lse, q, k, v, segments_of(p, cu_q, cu_k), {});
  const Tensor grad_q = poisoned(q.shape());
  const Tensor grad_k = poisoned(k.shape());
  const Tensor grad_v = poisoned(v.shape());
  attention_backward(Stream::cpu(), grad_q, grad_k, grad_v, grad_out, q, k, v, out, lse,
                     segments_of(p, cu_q, cu_k), {});
  const auto g = to_vector<double>(grad_out);
  const auto q0 = to_vector<double>(q);
  const auto k0 = to_vector<double>(k);
  const auto v0 = to_vector<double>(v);
  const auto loss = [&](const auto& q_, const auto& k_, const auto& v_) {
    return testing::dot(reference<double>(p, q_, k_, v_, g).out, g);
  };
  expect_gradient(grad_q, finite_difference([&](auto x) { return loss(x, k0, v0); }, q0));
  expect_gradient(grad_k, finite_difference([&](auto x) { return loss(q0, x, v0); }, k0));
  expect_gradient(grad_v, finite_difference([&](auto x) { return loss(q0, k0, x); }, v0));
}

TEST(AttentionThreadTest, ResultsDoNotDependOnThreads) {
  const Problem p{"", {0, 100, 100, 180, 181}, {0, 100, 100, 180, 181}, 4, 2, 40};
  const Tensor q = random_tensor({p.nq(), p.q_heads, p.d}, 1);
  const Tensor k = random_tensor({p.nk(), p.k_heads, p.d}, 2);
  const Tensor v = random_tensor({p.nk(), p.k_heads, p.d}, 3);
  const Tensor grad_out = random_tensor({p.nq(), p.q_heads, p.d}, 4);
  const Tensor cu = int_tensor(p.cu_q);
  std::vector<std::vector<Tensor>> runs;
  for (const int count : {1, 2, 5}) {
    const ThreadCount threads(count);
    const std::vector<Tensor> r{poisoned(q.shape()), poisoned({p.q_heads, p.nq()}),
                                poisoned(q.shape()), poisoned(k.shape()), poisoned(k.shape())};
    attention_forward(Stream::cpu(), r[0], r[1], q, k, v, segments_of(p, cu, cu), {});
    attention_backward(Stream::cpu(), r[2], r[3], r[4], grad_out, q, k, v, r[0], r[1],
                       segments_of(p, cu, cu), {});
    runs.push_back(r);
  }
  for (size_t run = 1; run < runs.size(); ++run) {
    for (size_t i = 0; i < runs[run].size(); ++i) expect_same_bits(runs[0][i], runs[run][i]);
  }
}

// A key that a query may not see changes no bit of the query's result: the loss guard must see a
// NaN where it arises, and a document never sees its neighbour.
TEST(AttentionIsolationTest, NaNStaysInItsDocumentAndShows) {
  const Problem p{"", {0, 80, 150}, {0, 80, 150}, 1, 1, 16};
  const Tensor q = random_tensor({150, 1, 16}, 1);
  const Tensor k = random_tensor({150, 1, 16}, 2);
  const Tensor v = random_tensor({150, 1, 16}, 3);
  k.data<float>()[90 * 16] = testing::kPoison;
  const Tensor cu = int_tensor(p.cu_q);
  const Tensor out = poisoned(q.shape());
  const Tensor lse = poisoned({1, 150});
  attention_forward(Stream::cpu(), out, lse, q, k, v, segments_of(p, cu, cu), {});
  for (int64_t i = 0; i < 150; ++i) {
    const bool sees = i >= 90;
    EXPECT_EQ(std::isnan(out.data<float>()[i * 16]), sees) << "query " << i;
  }
}

TEST(AttentionDeathTest, SegmentsMustCoverTheTokens) {
  const Tensor x = random_tensor({10, 1, 8}, 1);
  const Tensor out = poisoned(x.shape());
  const Tensor lse = poisoned({1, 10});
  const Tensor cu = int_tensor({0, 9});
  EXPECT_DEATH(attention_forward(Stream::cpu(), out, lse, x, x, x, {cu, cu, 9, 9}, {}),
               "does not cover q");
}

}  // namespace
}  // namespace muster
