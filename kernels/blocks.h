// How CPU kernels cut their work among threads. The cuts depend on sizes only, never on the number
// of threads, so that neither sums nor the vector/tail split of a loop change with it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace muster::cpu {

// Below this many elements, waking the other threads costs more than they save.
constexpr int64_t kParallelElements = 16384;
constexpr int64_t kBlockElements = 4096;

// body(begin, end) for consecutive blocks of [0, n), in parallel. Only the last block is ragged.
template <typename F>
void for_blocks(int64_t n, F body) {
  const int64_t blocks = (n + kBlockElements - 1) / kBlockElements;
#pragma omp parallel for schedule(static) if (n >= kParallelElements)
  for (int64_t b = 0; b < blocks; ++b) {
    body(b * kBlockElements, std::min(n, (b + 1) * kBlockElements));
  }
}

// Rows in blocks whose partial sums are added in order: at least 32 rows a block, so that adding
// the partials stays cheap, and at most 64 blocks, so that they stay small.
struct RowBlocks {
  int64_t rows;
  int64_t rows_per_block;
  int64_t count;

  explicit RowBlocks(int64_t n) : rows(n) {
    constexpr int64_t kMinRows = 32;
    constexpr int64_t kMaxBlocks = 64;
    rows_per_block = std::max(kMinRows, (n + kMaxBlocks - 1) / kMaxBlocks);
    count = (n + rows_per_block - 1) / rows_per_block;
  }
  int64_t begin(int64_t block) const { return block * rows_per_block; }
  int64_t end(int64_t block) const { return std::min(rows, (block + 1) * rows_per_block); }
};

}  // namespace muster::cpu
