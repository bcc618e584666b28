// One unit of work is a key head of a segment with all query heads that read it: it alone writes
// the gradients of its keys, so nothing depends on which thread runs it. A unit packs its keys and
// values once, then goes over its query tiles; the scores of one tile exist at a time.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/attention/tile_product_cpu.h"
#include "kernels/attention/tiles_cpu.h"

namespace muster::cpu {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Rows of one head of a [N, H, D] view, from token `begin` on.
template <typename T>
struct Head {
  T* data;
  int64_t stride;
  T* row(int64_t i) const { return data + i * stride; }
};
Head<const float> head_of(const ConstTensorView& x, int64_t begin, int64_t head) {
  return {x.data<float>() + begin * x.stride(0) + head * x.stride(1), x.stride(0)};
}
Head<float> head_of(const TensorView& x, int64_t begin, int64_t head) {
  return {x.data<float>() + begin * x.stride(0) + head * x.stride(1), x.stride(0)};
}

struct Unit {
  int64_t q_begin = 0;
  int64_t q_count = 0;
  int64_t k_begin = 0;
  int64_t k_count = 0;
  int64_t k_head = 0;
};

// Splits cu_seqlens into units, after checking what a wrong packing would break.
std::vector<Unit> make_units(const ConstTensorView& q, const ConstTensorView& k,
                             const Segments& segments) {
  const auto* q_edge = segments.cu_seqlens_q.data<int32_t>();
  const auto* k_edge = segments.cu_seqlens_k.data<int32_t>();
  const int64_t count = segments.cu_seqlens_q.size(0) - 1;
  MUSTER_CHECK(q_edge[0] == 0 && q_edge[count] == q.size(0), "cu_seqlens_q does not cover q");
  MUSTER_CHECK(k_edge[0] == 0 && k_edge[count] == k.size(0), "cu_seqlens_k does not cover k");
  std::vector<Unit> units;
  for (int64_t s = 0; s < count; ++s) {
    const int64_t q_count = q_edge[s + 1] - q_edge[s];
    const int64_t k_count = k_edge[s + 1] - k_edge[s];
    MUSTER_CHECK(q_count >= 0 && q_count <= segments.max_q, "segment " + std::to_string(s));
    MUSTER_CHECK(k_count >= 0 && k_count <= segments.max_k, "segment " + std::to_string(s));
    for (int64_t head = 0; head < k.size(1); ++head) {
      units.push_back({q_edge[s], q_count, k_edge[s], k_count, head});
    }
  }
  return units;
}

// Calls f(first row, row count, visible) for blocks of a tile's rows, with the tile's first query
// at `q` and its keys at [k, k + columns). Blocks of 16 rows follow the diagonal's staircase, so
// that half of a diagonal tile is skipped; a tile that every row sees whole is one block, and a
// block that sees nothing is left out.
template <typename F>
void for_each_block(const Unit& unit, bool causal, int64_t q, int64_t rows, int64_t k,
                    int64_t columns, F f) {
  const int64_t first = causal ? q + 1 + unit.k_count - unit.q_count - k : columns;
  if (first >= columns) return f(int64_t{0}, rows, Visible{columns, columns});
  constexpr int64_t kStep = 16;
  for (int64_t r = 0; r < rows; r += kStep) {
    const int64_t count = std::min(kStep, rows - r);
    const int64_t seen = std::min(columns, first + r + count - 1);
    if (seen > 0) f(r, count, Visible{first + r, seen});
  }
}

// Keys of the unit that the tile of queries [q, q + rows) can see.
int64_t last_key(const Unit& unit, bool causal, int64_t q, int64_t rows) {
  return causal ? std::clamp<int64_t>(q + rows + unit.k_count - unit.q_count, 0, unit.k_count)
                : unit.k_count;
}

// Cuts a thread's scratch memory into pieces of whole vectors.
class Scratch {
 public:
  explicit Scratch(int64_t floats) : memory_({std::max<int64_t>(floats, 1)}, DType::kFloat32) {}
  float* take(int64_t floats) {
    float* piece = memory_.data<float>() + used_;
    used_ += padded(floats);
    MUSTER_CHECK(used_ <= memory_.numel());
    return piece;
  }

 private:
  Tensor memory_;
  int64_t used_ = 0;
};

int64_t tiles_of(int64_t rows) {
  return (rows + kTile - 1) / kTile;
}

struct ForwardScratch {
  ForwardScratch(int64_t max_k, int64_t d)
      : memory(tiles_of(max_k) * kTile * (padded(d) + d) + 2 * kTile * padded(d) + kTile * kTile),
        v(memory.take(tiles_of(max_k) * kTile * padded(d))),
        k_transposed(memory.take(tiles_of(max_k) * kTile * d)),
        q(memory.take(kTile * padded(d))),
        out(memory.take(kTile * padded(d))),
        scores(memory.take(kTile * kTile)) {}
  Scratch memory;
  float* v;
  float* k_transposed;
  float* q;
  float* out;
  float* scores;
};

void forward_tile(const Unit& unit, const ForwardScratch& scratch, Head<float> out, float* lse,
                  Head<const float> q, int64_t begin, int64_t rows, int64_t d,
                  const AttentionOptions& options) {
  const int64_t width = padded(d);
  RowState state[kTile];
  std::fill_n(state, rows, RowState{-kInfinity, 0.0f});
  std::fill_n(scratch.out, rows * width, 0.0f);
  pack_rows(scratch.q, q.row(begin), q.stride, rows, d, options.scale);
  const int64_t last = last_key(unit, options.causal, begin, rows);
  for (int64_t k = 0; k < last; k += kTile) {
    const int64_t columns = std::min(kTile, unit.k_count - k);
    for_each_block(unit, options.causal, begin, rows, k, columns,
                   [&](int64_t r, int64_t count, Visible visible) {
                     float* scores = scratch.scores + r * kTile;
                     float* sum = scratch.out + r * width;
                     tile_product(scores, kTile, scratch.q + r * width, width, 1,
                                  scratch.k_transposed + k * d, kTile, count,
                                  padded(visible.columns), d, false);
                     softmax_block(scores, state + r, sum, width, count, visible);
                     tile_product(sum, width, scores, kTile, 1, scratch.v + k * width, width, count,
                                  width, visible.columns, true);
                   });
  }
  for (int64_t r = 0; r < rows; ++r) {
    const bool any = state[r].sum != 0.0f;
    unpack_rows(out.row(begin + r), out.stride, scratch.out + r * width, 1, d,
                any ? 1.0f / state[r].sum : 0.0f);
    lse[r] = any ? state[r].max + std::log(state[r].sum) : -kInfinity;
  }
}

struct BackwardScratch {
  BackwardScratch(int64_t max_k, int64_t d)
      : memory(tiles_of(max_k) * kTile * (3 * padded(d) + 2 * d) + 3 * kTile * padded(d) +
               2 * kTile * kTile + kTile),
        k(memory.take(tiles_of(max_k) * kTile * padded(d))),
        grad_k(memory.take(tiles_of(max_k) * kTile * padded(d))),
        grad_v(memory.take(tiles_of(max_k) * kTile * padded(d))),
        k_transposed(memory.take(tiles_of(max_k) * kTile * d)),
        v_transposed(memory.take(tiles_of(max_k) * kTile * d)),
        q(memory.take(kTile * padded(d))),
        grad_q(memory.take(kTile * padded(d))),
        grad_out(memory.take(kTile * padded(d))),
        scores(memory.take(kTile * kTile)),
        grad_scores(memory.take(kTile * kTile)),
        delta(memory.take(kTile)) {}
  Scratch memory;
  float* k;
  float* grad_k;
  float* grad_v;
  float* k_transposed;
  float* v_transposed;
  float* q;
  float* grad_q;
  float* grad_out;
  float* scores;
  float* grad_scores;
  float* delta;
};

void backward_tile(const Unit& unit, const BackwardScratch& scratch, Head<float> grad_q,
                   Head<const float> grad_out, Head<const float> q, Head<const float> out,
                   const float* lse, int64_t begin, int64_t rows, int64_t d,
                   const AttentionOptions& options) {
  const int64_t width = padded(d);
  pack_rows(scratch.q, q.row(begin), q.stride, rows, d, options.scale);
  pack_rows(scratch.grad_out, grad_out.row(begin), grad_out.stride, rows, d, 1.0f);
  std::fill_n(scratch.grad_q, rows * width, 0.0f);
  // Σ_j p_j · grad p_j = grad out · out: the softmax's gradient needs no second pass over the keys.
  row_dots(scratch.delta, scratch.grad_out, width, out.row(begin), out.stride, rows, d);
  const int64_t last = last_key(unit, options.causal, begin, rows);
  for (int64_t k = 0; k < last; k += kTile) {
    const int64_t columns = std::min(kTile, unit.k_count - k);
    for_each_block(unit, options.causal, begin, rows, k, columns,
                   [&](int64_t r, int64_t count, Visible visible) {
                     float* scores = scratch.scores + r * kTile;
                     float* grad_scores = scratch.grad_scores + r * kTile;
                     const float* q_rows = scratch.q + r * width;
                     const float* grad_rows = scratch.grad_out + r * width;
                     const int64_t seen = visible.columns;
                     tile_product(scores, kTile, q_rows, width, 1, scratch.k_transposed + k * d,
                                  kTile, count, padded(seen), d, false);
                     tile_product(grad_scores, kTile, grad_rows, width, 1,
                                  scratch.v_transposed + k * d, kTile, count, padded(seen), d,
                                  false);
                     softmax_gradient_block(scores, grad_scores, lse + begin + r, scratch.delta + r,
                                            count, visible);
                     tile_product(scratch.grad_v + k * width, width, scores, 1, kTile, grad_rows,
                                  width, seen, width, count, true);
                     tile_product(scratch.grad_k + k * width, width, grad_scores, 1, kTile, q_rows,
                                  width, seen, width, count, true);
                     tile_product(scratch.grad_q + r * width, width, grad_scores, kTile, 1,
                                  scratch.k + k * width, width, count, width, seen, true);
                   });
  }
  unpack_rows(grad_q.row(begin), grad_q.stride, scratch.grad_q, rows, d, options.scale);
}

}  // namespace

void attention_forward(const Stream&, TensorView out, TensorView lse, ConstTensorView q,
                       ConstTensorView k, ConstTensorView v, const Segments& segments,
                       const AttentionOptions& options) {
  const int64_t d = q.size(2);
  const int64_t group = q.size(1) / k.size(1);
  const std::vector<Unit> units = make_units(q, k, segments);
#pragma omp parallel
  {
    const ForwardScratch scratch(segments.max_k, d);
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < units.size(); ++i) {
      const Unit& unit = units[i];
      const auto k_rows = head_of(k, unit.k_begin, unit.k_head);
      const auto v_rows = head_of(v, unit.k_begin, unit.k_head);
      pack_transposed(scratch.k_transposed, k_rows.data, k_rows.stride, unit.k_count, d);
      pack_rows(scratch.v, v_rows.data, v_rows.stride, unit.k_count, d, 1.0f);
      for (int64_t head = unit.k_head * group; head < (unit.k_head + 1) * group; ++head) {
        float* lse_head = lse.data<float>() + head * q.size(0) + unit.q_begin;
        for (int64_t begin = 0; begin < unit.q_count; begin += kTile) {
          forward_tile(unit, scratch, head_of(out, unit.q_begin, head), lse_head + begin,
                       head_of(q, unit.q_begin, head), begin, std::min(kTile, unit.q_count - begin),
                       d, options);
        }
      }
    }
  }
}

void attention_backward(const Stream&, TensorView grad_q, TensorView grad_k, TensorView grad_v,
                        ConstTensorView grad_out, ConstTensorView q, ConstTensorView k,
                        ConstTensorView v, ConstTensorView out, ConstTensorView lse,
                        const Segments& segments, const AttentionOptions& options) {
  const int64_t d = q.size(2);
  const int64_t width = padded(d);
  const int64_t group = q.size(1) / k.size(1);
  const std::vector<Unit> units = make_units(q, k, segments);
#pragma omp parallel
  {
    const BackwardScratch scratch(segments.max_k, d);
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < units.size(); ++i) {
      const Unit& unit = units[i];
      const auto k_rows = head_of(k, unit.k_begin, unit.k_head);
      const auto v_rows = head_of(v, unit.k_begin, unit.k_head);
      pack_rows(scratch.k, k_rows.data, k_rows.stride, unit.k_count, d, 1.0f);
      pack_transposed(scratch.k_transposed, k_rows.data, k_rows.stride, unit.k_count, d);
      pack_transposed(scratch.v_transposed, v_rows.data, v_rows.stride, unit.k_count, d);
      std::fill_n(scratch.grad_k, unit.k_count * width, 0.0f);
      std::fill_n(scratch.grad_v, unit.k_count * width, 0.0f);
      for (int64_t head = unit.k_head * group; head < (unit.k_head + 1) * group; ++head) {
        const float* lse_head = lse.data<float>() + head * q.size(0) + unit.q_begin;
        for (int64_t begin = 0; begin < unit.q_count; begin += kTile) {
          backward_tile(unit, scratch, head_of(grad_q, unit.q_begin, head),
                        head_of(grad_out, unit.q_begin, head), head_of(q, unit.q_begin, head),
                        head_of(out, unit.q_begin, head), lse_head, begin,
                        std::min(kTile, unit.q_count - begin), d, options);
        }
      }
      const auto grad_k_rows = head_of(grad_k, unit.k_begin, unit.k_head);
      const auto grad_v_rows = head_of(grad_v, unit.k_begin, unit.k_head);
      unpack_rows(grad_k_rows.data, grad_k_rows.stride, scratch.grad_k, unit.k_count, d, 1.0f);
      unpack_rows(grad_v_rows.data, grad_v_rows.stride, scratch.grad_v, unit.k_count, d, 1.0f);
    }
  }
}

}  // namespace muster::cpu
