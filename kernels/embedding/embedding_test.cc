#include "kernels/embedding/embedding.h"

#include "kernels/testing.h"

namespace muster {
namespace {

using namespace testing;

constexpr int64_t kVocab = 11;

TEST(EmbeddingTest, ForwardCopiesRows) {
  for (const int64_t d : {1, 3, 17, 257}) {
    for (const int64_t n : {0, 1, 5, 63}) {
      const Tensor weight = random_tensor({kVocab, d}, 1);
      const Tensor ids = random_ints({n}, 2, 0, kVocab);
      const Tensor out = poisoned({n, d});
      embedding_forward(Stream::cpu(), out, weight, ids);
      for (int64_t i = 0; i < n; ++i) {
        const int32_t id = ids.data<int32_t>()[i];
        expect_same_bits(out.view().slice(i, i + 1), weight.view().slice(id, id + 1));
      }
    }
  }
}

TEST(EmbeddingTest, BackwardAddsInOrderOfTokens) {
  for (const int64_t d : {1, 3, 17, 257}) {
    const int64_t n = 63;
    const Tensor grad_out = random_tensor({n, d}, 3);
    const Tensor ids = random_ints({n}, 4, 0, kVocab);
    const Tensor grad_weight = random_tensor({kVocab, d}, 5);
    std::vector<float> want = to_vector<float>(grad_weight);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < d; ++j) {
        want[ids.data<int32_t>()[i] * d + j] += grad_out.data<float>()[i * d + j];
      }
    }
    embedding_backward(Stream::cpu(), grad_weight, grad_out, ids);
    EXPECT_EQ(to_vector<float>(grad_weight), want);
  }
}

TEST(EmbeddingTest, OrderSortsByIdAndKeepsTheOrderOfTokens) {
  const Tensor ids = int_tensor({5, 2, 5, 0, 2, 5});
  const Tensor order({6, 2}, DType::kInt32);
  embedding_order(Stream::cpu(), order, ids, 6);
  const int32_t* got = order.data<int32_t>();
  EXPECT_EQ(std::vector<int32_t>(got, got + 12),
            (std::vector<int32_t>{3, 0, 1, 2, 4, 2, 0, 5, 2, 5, 5, 5}));
}

// 63 · 257 elements run on one thread; this is large enough for several.
TEST(EmbeddingTest, ThreadCountChangesNothing) {
  const Tensor grad_out = random_tensor({300, 257}, 6);
  const Tensor ids = random_ints({300}, 7, 0, kVocab);
  Tensor results[2];
  for (const int threads : {1, 3}) {
    const ThreadCount count(threads);
    Tensor& grad_weight = results[threads / 3];
    grad_weight = Tensor::zeros({kVocab, 257}, DType::kFloat32);
    embedding_backward(Stream::cpu(), grad_weight, grad_out, ids);
  }
  expect_same_bits(results[0], results[1]);
}

TEST(EmbeddingDeathTest, RefusesAnIdOutsideTheTable) {
  const Tensor weight = random_tensor({kVocab, 4}, 1);
  const Tensor out = poisoned({1, 4});
  for (const int32_t id : {-1, static_cast<int32_t>(kVocab)}) {
    const Tensor ids = int_tensor({id});
    EXPECT_DEATH(embedding_forward(Stream::cpu(), out, weight, ids), std::to_string(id));
    EXPECT_DEATH(embedding_backward(Stream::cpu(), weight, out, ids), std::to_string(id));
  }
}

}  // namespace
}  // namespace muster
