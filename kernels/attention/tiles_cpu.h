// What happens to a tile of attention between its products: packing, softmax, its gradient. Packed
// rows are padded with zeros to a multiple of 16 floats, so that every product works on whole
// vectors.
#pragma once

#include <cstdint>

namespace muster::cpu {

// Queries and keys of a tile: its scores take 16 KiB.
constexpr int64_t kTile = 64;

// x rounded up to whole vectors.
constexpr int64_t padded(int64_t x) {
  return (x + 15) / 16 * 16;
}

// to [rows, padded(columns)] = from [rows, columns] · scale; `from` has rows of `stride` floats.
void pack_rows(float* to, const float* from, int64_t stride, int64_t rows, int64_t columns,
               float scale);

// Tiles of kTile rows of `from` [rows, columns], each transposed: to [⌈rows / kTile⌉, columns,
// kTile].
void pack_transposed(float* to, const float* from, int64_t stride, int64_t rows, int64_t columns);

// Running softmax of the rows of a query tile: maximum and sum of exp(score − maximum) so far.
struct RowState {
  float max;
  float sum;
};

// Which scores of a block count: row r sees its first clamp(first + r, 0, columns) columns. The
// other columns below padded(columns) become probability 0.
struct Visible {
  int64_t first = 0;
  int64_t columns = 0;
};

// One step of the online softmax over `rows` rows of scores [rows, kTile], which become
// exp(score − new maximum). Rescales out [rows, ld] (ld floats in a row, all of them) to the new
// maximum.
void softmax_block(float* scores, RowState* state, float* out, int64_t ld, int64_t rows,
                   Visible visible);

// Backward of the same block: scores [rows, kTile] become probabilities exp(score − lse[r]), and
// grad (that of the probabilities) becomes that of the scores, p · (grad − delta[r]).
void softmax_gradient_block(float* scores, float* grad, const float* lse, const float* delta,
                            int64_t rows, Visible visible);

// to [rows, columns] = from · scale, from [rows, padded(columns)].
void unpack_rows(float* to, int64_t stride, const float* from, int64_t rows, int64_t columns,
                 float scale);

// to[i] = Σ_j a[i, j] · b[i, j], for rows of `columns` floats that lie strides apart.
void row_dots(float* to, const float* a, int64_t a_stride, const float* b, int64_t b_stride,
              int64_t rows, int64_t columns);

}  // namespace muster::cpu
