#include "kernels/attention/tiles_cpu.h"

#include <algorithm>
#include <limits>

#include "kernels/narrow_floats.h"
#include "kernels/vector_math.h"

namespace muster::cpu {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <typename T>
MUSTER_INLINE void pack(float* to, const T* from, int64_t stride, int64_t rows, int64_t columns,
                        float scale) {
  const int64_t width = padded(columns);
  for (int64_t i = 0; i < rows; ++i, to += width, from += stride) {
    for (int64_t j = 0; j < columns; ++j) to[j] = to_float(from[j]) * scale;
    for (int64_t j = columns; j < width; ++j) to[j] = 0.0f;
  }
}

template <typename T>
MUSTER_INLINE void unpack(T* to, int64_t stride, const float* from, int64_t rows, int64_t columns,
                          float scale) {
  const int64_t width = padded(columns);
  for (int64_t i = 0; i < rows; ++i, to += stride, from += width) {
    for (int64_t j = 0; j < columns; ++j) to[j] = from_float<T>(from[j] * scale);
  }
}

template <typename T>
void transpose(float* to, const T* from, int64_t stride, int64_t rows, int64_t columns) {
  for (int64_t begin = 0; begin < rows; begin += kTile, to += columns * kTile) {
    const int64_t count = std::min(kTile, rows - begin);
    const T* tile = from + begin * stride;
    for (int64_t d = 0; d < columns; ++d) {
      float* row = to + d * kTile;
      for (int64_t j = 0; j < count; ++j) row[j] = to_float(tile[j * stride + d]);
      for (int64_t j = count; j < kTile; ++j) row[j] = 0.0f;
    }
  }
}

// What columns row r of a block sees.
struct Seen {
  int64_t begin;
  int64_t end;
};
template <bool kLeft>
MUSTER_INLINE Seen seen_by(const Visible& visible, int64_t r) {
  return {kLeft ? std::clamp<int64_t>(visible.begin + r, 0, visible.columns) : 0,
          std::clamp<int64_t>(visible.end + r, 0, visible.columns)};
}
// x in the lanes of columns [j, j + kLanes) that are seen, else y.
template <bool kLeft>
MUSTER_INLINE Vec choose_seen(const Seen& seen, int64_t j, Vec x, Vec y) {
  const Vec chosen = choose_first(seen.end - j, x, y);
  return kLeft ? choose_first(seen.begin - j, y, chosen) : chosen;
}
// Some row of the block does not see its first column: only a window makes that.
MUSTER_INLINE bool bounded_left(const Visible& visible, int64_t rows) {
  return visible.begin + rows - 1 > 0;
}

template <bool kLeft>
MUSTER_INLINE Vec row_maximum(const float* row, const Seen& seen) {
  Vec top = broadcast(-kInfinity);
  if constexpr (kLeft) {
    for (int64_t j = 0; j < seen.end; j += kLanes) {
      top = max(top, choose_seen<kLeft>(seen, j, load(row + j), broadcast(-kInfinity)));
    }
  } else {
    const int64_t whole = seen.end / kLanes * kLanes;
    for (int64_t j = 0; j < whole; j += kLanes) top = max(top, load(row + j));
    if (whole < seen.end) {
      top = max(top, choose_first(seen.end - whole, load(row + whole), broadcast(-kInfinity)));
    }
  }
  return top;
}

template <bool kLeft>
MUSTER_INLINE void softmax_rows(float* scores, RowState* state, float* out, int64_t ld,
                                int64_t rows, const Visible& visible) {
  const int64_t width = padded(visible.columns);
  // First the maxima of all rows, then all exponentials: a row's are a long chain of dependent
  // instructions, and the processor overlaps the rows of a simple loop.
  float shift[kTile];
  for (int64_t r = 0; r < rows; ++r) {
    const Vec top = row_maximum<kLeft>(scores + r * kTile, seen_by<kLeft>(visible, r));
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
    const Seen seen = seen_by<kLeft>(visible, r);
    Vec sum{};
    for (int64_t j = 0; j < width; j += kLanes) {
      const Vec p = choose_seen<kLeft>(seen, j, softmax_exp(load(row + j) - shift[r]), Vec{});
      store(row + j, p);
      sum += p;
    }
    state[r].sum += reduce_add(sum);
  }
}

template <bool kLeft>
MUSTER_INLINE void softmax_gradient_rows(float* scores, float* grad, const float* lse,
                                         const float* delta, int64_t rows, const Visible& visible) {
  const int64_t width = padded(visible.columns);
  for (int64_t r = 0; r < rows; ++r, scores += kTile, grad += kTile) {
    const Seen seen = seen_by<kLeft>(visible, r);
    const float row_delta = delta[r];
    const float row_lse = seen.begin < seen.end ? lse[r] : 0.0f;
    for (int64_t j = 0; j < width; j += kLanes) {
      const Vec p = choose_seen<kLeft>(seen, j, softmax_exp(load(scores + j) - row_lse), Vec{});
      store(scores + j, p);
      store(grad + j, p * (load(grad + j) - row_delta));
    }
  }
}

}  // namespace

MUSTER_SIMD_CLONES void pack_rows(float* to, const HeadRows<const void>& from, int64_t rows,
                                  int64_t columns, float scale) {
  if (from.dtype == DType::kFloat32) {
    pack(to, static_cast<const float*>(from.data), from.stride, rows, columns, scale);
  } else if (from.dtype == DType::kBFloat16) {
    pack(to, static_cast<const BFloat16*>(from.data), from.stride, rows, columns, scale);
  } else {
    pack(to, static_cast<const Float16*>(from.data), from.stride, rows, columns, scale);
  }
}

MUSTER_SIMD_CLONES void unpack_rows(const HeadRows<void>& to, const float* from, int64_t rows,
                                    int64_t columns, float scale) {
  if (to.dtype == DType::kFloat32) {
    unpack(static_cast<float*>(to.data), to.stride, from, rows, columns, scale);
  } else if (to.dtype == DType::kBFloat16) {
    unpack(static_cast<BFloat16*>(to.data), to.stride, from, rows, columns, scale);
  } else {
    unpack(static_cast<Float16*>(to.data), to.stride, from, rows, columns, scale);
  }
}

void pack_transposed(float* to, const HeadRows<const void>& from, int64_t rows, int64_t columns) {
  if (from.dtype == DType::kFloat32) {
    transpose(to, static_cast<const float*>(from.data), from.stride, rows, columns);
  } else if (from.dtype == DType::kBFloat16) {
    transpose(to, static_cast<const BFloat16*>(from.data), from.stride, rows, columns);
  } else {
    transpose(to, static_cast<const Float16*>(from.data), from.stride, rows, columns);
  }
}

MUSTER_SIMD_CLONES void row_dots(float* to, const float* a, const float* b, int64_t rows,
                                 int64_t columns) {
  const int64_t width = padded(columns);
  for (int64_t i = 0; i < rows; ++i, a += width, b += width) {
    Vec sum{};
    int64_t j = 0;
    for (; j + kLanes <= columns; j += kLanes) sum += load(a + j) * load(b + j);
    float tail = 0.0f;
    for (; j < columns; ++j) tail += a[j] * b[j];
    to[i] = reduce_add(sum) + tail;
  }
}

MUSTER_SIMD_CLONES void cap_block(float* scores, float* slope, float cap, int64_t rows,
                                  int64_t columns) {
  const int64_t width = padded(columns);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = r * kTile; j < r * kTile + width; j += kLanes) {
      const Vec t = fast_tanh(load(scores + j) / cap);
      store(scores + j, t * cap);
      if (slope != nullptr) store(slope + j, (1.0f - t) * (1.0f + t));
    }
  }
}

MUSTER_SIMD_CLONES void multiply_block(float* x, const float* factor, int64_t rows,
                                       int64_t columns) {
  const int64_t width = padded(columns);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = r * kTile; j < r * kTile + width; j += kLanes) {
      store(x + j, load(x + j) * load(factor + j));
    }
  }
}

MUSTER_SIMD_CLONES void softmax_block(float* scores, RowState* state, float* out, int64_t ld,
                                      int64_t rows, Visible visible) {
  if (bounded_left(visible, rows)) {
    softmax_rows<true>(scores, state, out, ld, rows, visible);
  } else {
    softmax_rows<false>(scores, state, out, ld, rows, visible);
  }
}

MUSTER_SIMD_CLONES void softmax_gradient_block(float* scores, float* grad, const float* lse,
                                               const float* delta, int64_t rows, Visible visible) {
  if (bounded_left(visible, rows)) {
    softmax_gradient_rows<true>(scores, grad, lse, delta, rows, visible);
  } else {
    softmax_gradient_rows<false>(scores, grad, lse, delta, rows, visible);
  }
}

}  // namespace muster::cpu
