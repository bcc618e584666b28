// What happens to a tile of attention between its products: packing, softmax, its gradient. Packed
// rows are padded with zeros to a multiple of 16 floats, so that every product works on whole
// vectors.
#pragma once

#include <cstdint>

#include "common/tensor.h"

namespace muster::cpu {

// Queries and keys of a tile: its scores take 16 KiB.
constexpr int64_t kTile = 64;

// x rounded up to whole vectors.
constexpr int64_t padded(int64_t x) {
  return (x + 15) / 16 * 16;
}

// Rows of one head of a [tokens, heads, D] view of float32, bfloat16 or float16.
template <typename Void>
struct HeadRows {
  Void* data = nullptr;
  int64_t stride = 0;  // elements
  DType dtype = DType::kFloat32;

  // Of head `head`, from token `token` on.
  HeadRows(const BasicTensorView<Void>& view, int64_t token, int64_t head)
      : HeadRows(view.raw(), view.stride(0), view.dtype()) {
    data = advanced(token * view.stride(0) + head * view.stride(1));
  }
  HeadRows(Void* first, int64_t row_stride, DType type)
      : data(first), stride(row_stride), dtype(type) {}
  HeadRows from(int64_t row) const { return {advanced(row * stride), stride, dtype}; }

 private:
  Void* advanced(int64_t elements) const {
    using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
    return static_cast<Byte*>(data) + elements * static_cast<int64_t>(size_of(dtype));
  }
};

// to [rows, padded(columns)] = from [rows, columns] · scale.
void pack_rows(float* to, const HeadRows<const void>& from, int64_t rows, int64_t columns,
               float scale);

// Tiles of kTile rows of `from` [rows, columns], each transposed: to [⌈rows / kTile⌉, columns,
// kTile].
void pack_transposed(float* to, const HeadRows<const void>& from, int64_t rows, int64_t columns);

// Running softmax of the rows of a query tile: maximum and sum of exp(score − maximum) so far.
struct RowState {
  float max;
  float sum;
};

// Which scores of a block count: row r sees its columns from clamp(begin + r, 0, columns) to before
// clamp(end + r, 0, columns). The other columns below padded(columns) become probability 0.
struct Visible {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t columns = 0;
};

// scores [rows, kTile] become cap · tanh(score / cap) in their first padded(columns) columns, and
// slope, if any, the derivative: 1 − tanh².
void cap_block(float* scores, float* slope, float cap, int64_t rows, int64_t columns);

// One step of the online softmax over `rows` rows of scores [rows, kTile], which become
// exp(score − new maximum). Rescales out [rows, ld] (ld floats in a row, all of them) to the new
// maximum.
void softmax_block(float* scores, RowState* state, float* out, int64_t ld, int64_t rows,
                   Visible visible);

// Backward of the same block: scores [rows, kTile] become probabilities exp(score − lse[r]), and
// grad (that of the probabilities) becomes that of the scores, p · (grad − delta[r]).
void softmax_gradient_block(float* scores, float* grad, const float* lse, const float* delta,
                            int64_t rows, Visible visible);

// x *= factor, both [rows, kTile], in their first padded(columns) columns.
void multiply_block(float* x, const float* factor, int64_t rows, int64_t columns);

// to [rows, columns] = from · scale, from [rows, padded(columns)].
void unpack_rows(const HeadRows<void>& to, const float* from, int64_t rows, int64_t columns,
                 float scale);

// to[i] = Σ_j a[i, j] · b[i, j], for packed rows of `columns` floats.
void row_dots(float* to, const float* a, const float* b, int64_t rows, int64_t columns);

}  // namespace muster::cpu
