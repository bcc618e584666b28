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
  for (int64_t r = 0; r < rows; ++r, scores += kTile, out += ld) {
    const auto seen =
        static_cast<int32_t>(std::clamp<int64_t>(visible.first + r, 0, visible.columns));
    // Only a row that some column is hidden from needs the mask.
    if (seen < width) {
      for (int64_t j = 0; j < width; j += kLanes) {
        const IntVec lane = kLaneIndex + static_cast<int32_t>(j);
        store(scores + j, lane < seen ? load(scores + j) : Vec{} - kInfinity);
      }
    }
    Vec top = load(scores);
    for (int64_t j = kLanes; j < width; j += kLanes) top = max(top, load(scores + j));
    const float before = state[r].max;
    const float now = std::max(before, reduce_max(top));
    // A row that has seen nothing yet subtracts 0 instead of −∞: its probabilities are exp(−∞) = 0.
    const float shift = now == -kInfinity ? 0.0f : now;
    Vec sum{};
    for (int64_t j = 0; j < width; j += kLanes) {
      const Vec p = softmax_exp(load(scores + j) - shift);
      store(scores + j, p);
      sum += p;
    }
    if (now != before) {
      const float factor = fast_exp(before - shift);
      state[r].sum *= factor;
      for (int64_t j = 0; j < ld; j += kLanes) store(out + j, load(out + j) * factor);
      state[r].max = now;
    }
    state[r].sum += reduce_add(sum);
  }
}

MUSTER_SIMD_CLONES void softmax_gradient_block(float* scores, float* grad, const float* lse,
                                               const float* delta, int64_t rows, Visible visible) {
  const int64_t width = padded(visible.columns);
  for (int64_t r = 0; r < rows; ++r, scores += kTile, grad += kTile) {
    const auto seen =
        static_cast<int32_t>(std::clamp<int64_t>(visible.first + r, 0, visible.columns));
    const float shift = seen > 0 ? lse[r] : 0.0f;
    for (int64_t j = 0; j < width; j += kLanes) {
      const IntVec lane = kLaneIndex + static_cast<int32_t>(j);
      Vec p = softmax_exp(load(scores + j) - shift);
      p = lane < seen ? p : Vec{};
      store(scores + j, p);
      store(grad + j, p * (load(grad + j) - delta[r]));
    }
  }
}

}  // namespace muster::cpu
