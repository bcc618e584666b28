#include "kernels/attention/tiles_cpu.h"

#include <algorithm>
#include <limits>

#include "kernels/vector_math.h"

namespace muster::cpu {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

}  // namespace

MUSTER_SIMD_CLONES void pack_rows(float* to, const float* from, int64_t stride, int64_t rows,
                                  int64_t columns, float scale) {
  const int64_t width = padded(columns);
  for (int64_t i = 0; i < rows; ++i, to += width, from += stride) {
    for (int64_t j = 0; j < columns; ++j) to[j] = from[j] * scale;
    for (int64_t j = columns; j < width; ++j) to[j] = 0.0f;
  }
}

MUSTER_SIMD_CLONES void unpack_rows(float* to, int64_t stride, const float* from, int64_t rows,
                                    int64_t columns, float scale) {
  const int64_t width = padded(columns);
  for (int64_t i = 0; i < rows; ++i, to += stride, from += width) {
    for (int64_t j = 0; j < columns; ++j) to[j] = from[j] * scale;
  }
}

MUSTER_SIMD_CLONES void row_dots(float* to, const float* a, int64_t a_stride, const float* b,
                                 int64_t b_stride, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i, a += a_stride, b += b_stride) {
    Vec sum{};
    int64_t j = 0;
    for (; j + kLanes <= columns; j += kLanes) sum += load(a + j) * load(b + j);
    float tail = 0.0f;
    for (; j < columns; ++j) tail += a[j] * b[j];
    to[i] = reduce_add(sum) + tail;
  }
}

void pack_transposed(float* to, const float* from, int64_t stride, int64_t rows, int64_t columns) {
  for (int64_t begin = 0; begin < rows; begin += kTile, to += columns * kTile) {
    const int64_t count = std::min(kTile, rows - begin);
    const float* tile = from + begin * stride;
    for (int64_t d = 0; d < columns; ++d) {
      float* row = to + d * kTile;
      for (int64_t j = 0; j < count; ++j) row[j] = tile[j * stride + d];
      for (int64_t j = count; j < kTile; ++j) row[j] = 0.0f;
    }
  }
}

MUSTER_SIMD_CLONES void softmax_block(float* scores, RowState* state, float* out, int64_t ld,
                                      int64_t rows, Visible visible) {
  const int64_t width = padded(visible.columns);
  // First the maxima of all rows, then all exponentials: a row's are a long chain of dependent
  // instructions, and the processor overlaps the rows of a simple loop.
  float shift[kTile];
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = scores + r * kTile;
    const int64_t seen = std::clamp<int64_t>(visible.first + r, 0, visible.columns);
    const int64_t whole = seen / kLanes * kLanes;
    Vec top = broadcast(-kInfinity);
    for (int64_t j = 0; j < whole; j += kLanes) top = max(top, load(row + j));
    if (whole < seen) {
      top = max(top, choose_first(seen - whole, load(row + whole), broadcast(-kInfinity)));
    }
    const float before = state[r].max;
    const float now = std::max(before, reduce_max(top));
    // A row that has seen nothing yet has no maximum to subtract.
    shift[r] = now == -kInfinity ? 0.0f : now;
    if (now != before) {
      const float factor = fast_exp(before - shift[r]);
      state[r] = {now, state[r].sum * factor};
      float* to = out + r * ld;
      for (int64_t j = 0; j < ld; j += kLanes) store(to + j, load(to + j) * factor);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    float* row = scores + r * kTile;
    const int64_t seen = std::clamp<int64_t>(visible.first + r, 0, visible.columns);
    Vec sum{};
    for (int64_t j = 0; j < width; j += kLanes) {
      const Vec p = choose_first(seen - j, softmax_exp(load(row + j) - shift[r]), Vec{});
      store(row + j, p);
      sum += p;
    }
    state[r].sum += reduce_add(sum);
  }
}

MUSTER_SIMD_CLONES void softmax_gradient_block(float* scores, float* grad, const float* lse,
                                               const float* delta, int64_t rows, Visible visible) {
  const int64_t width = padded(visible.columns);
  for (int64_t r = 0; r < rows; ++r, scores += kTile, grad += kTile) {
    const int64_t seen = std::clamp<int64_t>(visible.first + r, 0, visible.columns);
    const float row_delta = delta[r];
    const float row_lse = seen > 0 ? lse[r] : 0.0f;
    for (int64_t j = 0; j < width; j += kLanes) {
      const Vec p = choose_first(seen - j, softmax_exp(load(scores + j) - row_lse), Vec{});
      store(scores + j, p);
      store(grad + j, p * (load(grad + j) - row_delta));
    }
  }
}

}  // namespace muster::cpu
