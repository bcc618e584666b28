#include "kernels/cuda/gpu_testing.h"
#include "kernels/embedding/embedding.h"

namespace muster {
namespace {

using namespace testing;
using EmbeddingGpuTest = GpuTest;

void check(DType dtype, int64_t vocab, int64_t width, const std::vector<int32_t>& tokens) {
  const auto n = static_cast<int64_t>(tokens.size());
  Operand weight = Operand::random({vocab, width}, dtype, 1);
  Operand ids = Operand::ints(tokens);
  Operand out({n, width}, dtype);
  expect_matches_cpu({&weight, &ids}, {&out}, [&](const Stream& stream, const At& at) {
    embedding_forward(stream, at(out), at(weight), at(ids));
  });
  Operand grad_out = Operand::random({n, width}, dtype, 2);
  Operand grad_weight = Operand::random({vocab, width}, DType::kFloat32, 3);
  // The CPU adds a run of thousands one by one, and its own rounding errors grow with the run.
  expect_matches_cpu(
      {&grad_out, &ids}, {&grad_weight},
      [&](const Stream& stream, const At& at) {
        embedding_backward(stream, at(grad_weight), at(grad_out), at(ids));
      },
      16.0);
  Operand order({n, 2}, DType::kInt32);
  expect_matches_cpu({&ids}, {&order}, [&](const Stream& stream, const At& at) {
    embedding_order(stream, at(order), at(ids), vocab);
  });
  embedding_order(Stream::cpu(), order.host(), ids.host(), vocab);
  expect_matches_cpu(
      {&grad_out, &ids, &order}, {&grad_weight},
      [&](const Stream& stream, const At& at) {
        embedding_backward(stream, at(grad_weight), at(grad_out), at(ids), at(order));
      },
      16.0);
}

std::vector<int32_t> some_ids(int64_t n, int32_t vocab) {
  const Tensor ids = random_ints({n}, 5, 0, vocab);
  return std::vector<int32_t>(ids.data<int32_t>(), ids.data<int32_t>() + n);
}

TEST_F(EmbeddingGpuTest, MatchesTheCpu) {
  for (const DType dtype : activation_dtypes()) {
    check(dtype, 3, 1, {2});
    check(dtype, 11, 7, some_ids(100, 11));
    check(dtype, 1000, 64, some_ids(5000, 1000));
    check(dtype, 50, 2056, some_ids(333, 50));
    check(dtype, 40000, 8, some_ids(20001, 40000));    // two steps and two passes of the sort
    check(dtype, 270000, 1, some_ids(50000, 270000));  // four and three
    check(dtype, 1000, 2, some_ids(131072, 1000));     // as much as a cluster sorts,
    check(dtype, 70000, 1, some_ids(131073, 70000));   // and one more
  }
}

TEST_F(EmbeddingGpuTest, RunsOfOneIdCrossPiecesAndSortedBlocks) {
  for (const DType dtype : activation_dtypes()) {
    check(dtype, 4, 24, std::vector<int32_t>(5000, 3));  // one run over all
    std::vector<int32_t> ids;
    for (int i = 0; i < 4500; ++i) ids.push_back(i % 3 == 0 ? 1 : i % 64);
    check(dtype, 64, 16, ids);
    ids.clear();  // runs that end exactly at the borders of pieces
    for (int i = 0; i < 256; ++i) ids.push_back(i / 32);
    check(dtype, 8, 16, ids);
    // Runs of every length up to some pieces, at every distance from the borders.
    ids.clear();
    for (int id = 0; id < 140; ++id) ids.insert(ids.end(), id % 2 == 0 ? id + 1 : 1, id);
    check(dtype, 140, 20, ids);
    // A byte tokenizer's: few ids, and runs of more pieces than a warp joins.
    ids.clear();
    for (const int32_t id : some_ids(6000, 200)) ids.push_back(id < 80 ? 32 : id);
    check(dtype, 256, 136, ids);
  }
}

}  // namespace
}  // namespace muster
