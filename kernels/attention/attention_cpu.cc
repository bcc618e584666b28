// One unit of work is a key head of a segment with all query heads that read it: it alone writes
// the gradients of its keys, so nothing depends on which thread runs it. A unit packs its keys and
// values once, then goes over its query tiles; the scores of one tile exist at a time.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/attention/band.h"
#include "kernels/attention/dropout_mask.h"
#include "kernels/attention/tile_product_cpu.h"
#include "kernels/attention/tiles_cpu.h"

namespace muster::cpu {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

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

// What is asked of every score.
struct Rules {
  explicit Rules(const AttentionOptions& options)
      : scale(options.scale),
        cap(options.logit_cap),
        left(options.window_left < 0 ? kUnbounded : options.window_left),
        right(options.causal             ? 0
              : options.window_right < 0 ? kUnbounded
                                         : options.window_right),
        mask(options.dropout, options.dropout_seed, options.dropout_offset) {}
  Band band_of(const Unit& unit) const { return {unit.q_count, unit.k_count, left, right}; }
  float scale;
  float cap;
  int64_t left;
  int64_t right;
  DropoutMask mask;
};

// A tile of a unit's queries: rows [begin, begin + rows) of its segment.
struct QueryTile {
  const Unit& unit;
  int64_t head;
  int64_t begin;
  int64_t rows;
};

// Part of a tile of scores: rows [row, row + rows) of the tile of queries, keys from `key` of the
// segment on.
struct Block {
  int64_t row;
  int64_t rows;
  int64_t key;
  Visible visible;
};

// Calls f(block) for what a tile of queries sees, from the first key to the last. Blocks of 16 rows
// follow the band's staircase, so that half of a tile on its edge is skipped; a tile that every row
// sees whole is one block, and what nobody sees is left out. No block spans two tiles of keys; each
// begins at a multiple of kLanes in one.
template <typename F>
void for_each_block(const QueryTile& tile, const Band& band, F f) {
  const IndexRange tiles = band.key_tiles(tile.begin, tile.rows, kTile);
  for (int64_t k = tiles.begin * kTile; k < tiles.end * kTile; k += kTile) {
    const int64_t columns = std::min(kTile, band.k_count - k);
    if (band.whole(tile.begin, tile.rows, k, columns)) {
      f(Block{0, tile.rows, k, Visible{-kUnbounded, columns, columns}});
      continue;
    }
    constexpr int64_t kStep = 16;
    for (int64_t r = 0; r < tile.rows; r += kStep) {
      const int64_t rows = std::min(kStep, tile.rows - r);
      const int64_t q = tile.begin + r;
      const IndexRange keys = band.keys(q, rows);
      const int64_t first = k + std::max<int64_t>(keys.begin - k, 0) / kStep * kStep;
      const int64_t end = std::min(keys.end, k + columns);
      if (first >= end) continue;
      f(Block{r, rows, first,
              Visible{band.first_key(q) - first, band.end_key(q) - first, end - first}});
    }
  }
}

// The mask's factors for a block.
void mask_block(float* to, const DropoutMask& mask, const QueryTile& tile, const Block& block) {
  const int64_t query = tile.unit.q_begin + tile.begin + block.row;
  const int64_t key = tile.unit.k_begin + block.key;
  for (int64_t r = 0; r < block.rows; ++r) {
    mask.factors(to + r * kTile, query + r, tile.head, key, block.visible.columns);
  }
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

// Where a block's keys lie in transposed tiles.
const float* transposed_at(const float* tiles, int64_t key, int64_t d) {
  return tiles + key / kTile * kTile * d + key % kTile;
}

struct ForwardScratch {
  ForwardScratch(int64_t max_k, int64_t d)
      : memory(tiles_of(max_k) * kTile * (padded(d) + d) + 2 * kTile * padded(d) +
               2 * kTile * kTile),
        v(memory.take(tiles_of(max_k) * kTile * padded(d))),
        k_transposed(memory.take(tiles_of(max_k) * kTile * d)),
        q(memory.take(kTile * padded(d))),
        out(memory.take(kTile * padded(d))),
        scores(memory.take(kTile * kTile)),
        mask(memory.take(kTile * kTile)) {}
  Scratch memory;
  float* v;
  float* k_transposed;
  float* q;
  float* out;
  float* scores;
  float* mask;
};

void forward_tile(const QueryTile& tile, const ForwardScratch& scratch, const TensorView& out,
                  float* lse, const ConstTensorView& q, const Rules& rules) {
  const int64_t d = q.size(2);
  const int64_t width = padded(d);
  const int64_t token = tile.unit.q_begin + tile.begin;
  RowState state[kTile];
  std::fill_n(state, tile.rows, RowState{-kInfinity, 0.0f});
  std::fill_n(scratch.out, tile.rows * width, 0.0f);
  pack_rows(scratch.q, HeadRows(q, token, tile.head), tile.rows, d, rules.scale);
  for_each_block(tile, rules.band_of(tile.unit), [&](const Block& block) {
    const int64_t columns = block.visible.columns;
    float* scores = scratch.scores;
    float* sum = scratch.out + block.row * width;
    tile_product(scores, kTile, scratch.q + block.row * width, width, 1,
                 transposed_at(scratch.k_transposed, block.key, d), kTile, block.rows,
                 padded(columns), d, false);
    if (rules.cap > 0.0f) cap_block(scores, nullptr, rules.cap, block.rows, columns);
    softmax_block(scores, state + block.row, sum, width, block.rows, block.visible);
    if (rules.mask.active()) {
      mask_block(scratch.mask, rules.mask, tile, block);
      multiply_block(scores, scratch.mask, block.rows, columns);
    }
    tile_product(sum, width, scores, kTile, 1, scratch.v + block.key * width, width, block.rows,
                 width, columns, true);
  });
  const HeadRows<void> to(out, token, tile.head);
  for (int64_t r = 0; r < tile.rows; ++r) {
    const bool any = state[r].sum != 0.0f;
    unpack_rows(to.from(r), scratch.out + r * width, 1, d, any ? 1.0f / state[r].sum : 0.0f);
    lse[r] = any ? state[r].max + std::log(state[r].sum) : -kInfinity;
  }
}

struct BackwardScratch {
  BackwardScratch(int64_t max_k, int64_t d)
      : memory(tiles_of(max_k) * kTile * (3 * padded(d) + 2 * d) + 3 * kTile * padded(d) +
               4 * kTile * kTile + kTile),
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
        mask(memory.take(kTile * kTile)),
        slope(memory.take(kTile * kTile)),
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
  float* mask;
  float* slope;
  float* delta;
};

// The probabilities of a block, as the values' gradient wants them, and the gradient of its scores.
void backward_scores(const QueryTile& tile, const Block& block, const BackwardScratch& scratch,
                     const float* lse, int64_t d, const Rules& rules) {
  const int64_t width = padded(d);
  const int64_t columns = block.visible.columns;
  const auto product = [&](float* to, const float* left, const float* right) {
    tile_product(to, kTile, left + block.row * width, width, 1, transposed_at(right, block.key, d),
                 kTile, block.rows, padded(columns), d, false);
  };
  product(scratch.scores, scratch.q, scratch.k_transposed);
  product(scratch.grad_scores, scratch.grad_out, scratch.v_transposed);
  const bool capped = rules.cap > 0.0f;
  const bool masked = rules.mask.active();
  if (capped) cap_block(scratch.scores, scratch.slope, rules.cap, block.rows, columns);
  if (masked) {
    mask_block(scratch.mask, rules.mask, tile, block);
    multiply_block(scratch.grad_scores, scratch.mask, block.rows, columns);
  }
  softmax_gradient_block(scratch.scores, scratch.grad_scores, lse + block.row,
                         scratch.delta + block.row, block.rows, block.visible);
  if (masked) multiply_block(scratch.scores, scratch.mask, block.rows, columns);
  if (capped) multiply_block(scratch.grad_scores, scratch.slope, block.rows, columns);
}

void backward_tile(const QueryTile& tile, const BackwardScratch& scratch, const TensorView& grad_q,
                   const ConstTensorView& grad_out, const ConstTensorView& q,
                   const ConstTensorView& out, const float* lse, const Rules& rules) {
  const int64_t d = q.size(2);
  const int64_t width = padded(d);
  const int64_t token = tile.unit.q_begin + tile.begin;
  pack_rows(scratch.q, HeadRows(q, token, tile.head), tile.rows, d, rules.scale);
  pack_rows(scratch.grad_out, HeadRows(grad_out, token, tile.head), tile.rows, d, 1.0f);
  // Σ_j p_j · grad p_j = grad out · out: the softmax's gradient needs no second pass over the keys.
  pack_rows(scratch.grad_q, HeadRows(out, token, tile.head), tile.rows, d, 1.0f);
  row_dots(scratch.delta, scratch.grad_out, scratch.grad_q, tile.rows, d);
  std::fill_n(scratch.grad_q, tile.rows * width, 0.0f);
  for_each_block(tile, rules.band_of(tile.unit), [&](const Block& block) {
    const int64_t columns = block.visible.columns;
    backward_scores(tile, block, scratch, lse, d, rules);
    tile_product(scratch.grad_v + block.key * width, width, scratch.scores, 1, kTile,
                 scratch.grad_out + block.row * width, width, columns, width, block.rows, true);
    tile_product(scratch.grad_k + block.key * width, width, scratch.grad_scores, 1, kTile,
                 scratch.q + block.row * width, width, columns, width, block.rows, true);
    tile_product(scratch.grad_q + block.row * width, width, scratch.grad_scores, kTile, 1,
                 scratch.k + block.key * width, width, block.rows, width, columns, true);
  });
  unpack_rows(HeadRows(grad_q, token, tile.head), scratch.grad_q, tile.rows, d, rules.scale);
}

// Calls f(tile) for the query tiles of all heads that read a unit's keys.
template <typename F>
void for_each_tile(const Unit& unit, int64_t group, F f) {
  for (int64_t head = unit.k_head * group; head < (unit.k_head + 1) * group; ++head) {
    for (int64_t begin = 0; begin < unit.q_count; begin += kTile) {
      f(QueryTile{unit, head, begin, std::min(kTile, unit.q_count - begin)});
    }
  }
}

}  // namespace

void attention_forward(const Stream&, TensorView out, TensorView lse, ConstTensorView q,
                       ConstTensorView k, ConstTensorView v, const Segments& segments,
                       const AttentionOptions& options) {
  const int64_t d = q.size(2);
  const int64_t group = q.size(1) / k.size(1);
  const Rules rules(options);
  const std::vector<Unit> units = make_units(q, k, segments);
#pragma omp parallel
  {
    const ForwardScratch scratch(segments.max_k, d);
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < units.size(); ++i) {
      const Unit& unit = units[i];
      pack_transposed(scratch.k_transposed, HeadRows(k, unit.k_begin, unit.k_head), unit.k_count,
                      d);
      pack_rows(scratch.v, HeadRows(v, unit.k_begin, unit.k_head), unit.k_count, d, 1.0f);
      for_each_tile(unit, group, [&](const QueryTile& tile) {
        float* tile_lse = lse.data<float>() + tile.head * q.size(0) + unit.q_begin + tile.begin;
        forward_tile(tile, scratch, out, tile_lse, q, rules);
      });
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
  const Rules rules(options);
  const std::vector<Unit> units = make_units(q, k, segments);
#pragma omp parallel
  {
    const BackwardScratch scratch(segments.max_k, d);
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < units.size(); ++i) {
      const Unit& unit = units[i];
      const HeadRows k_rows(k, unit.k_begin, unit.k_head);
      pack_rows(scratch.k, k_rows, unit.k_count, d, 1.0f);
      pack_transposed(scratch.k_transposed, k_rows, unit.k_count, d);
      pack_transposed(scratch.v_transposed, HeadRows(v, unit.k_begin, unit.k_head), unit.k_count,
                      d);
      std::fill_n(scratch.grad_k, unit.k_count * width, 0.0f);
      std::fill_n(scratch.grad_v, unit.k_count * width, 0.0f);
      for_each_tile(unit, group, [&](const QueryTile& tile) {
        const float* tile_lse =
            lse.data<float>() + tile.head * q.size(0) + unit.q_begin + tile.begin;
        backward_tile(tile, scratch, grad_q, grad_out, q, out, tile_lse, rules);
      });
      unpack_rows(HeadRows(grad_k, unit.k_begin, unit.k_head), scratch.grad_k, unit.k_count, d,
                  1.0f);
      unpack_rows(HeadRows(grad_v, unit.k_begin, unit.k_head), scratch.grad_v, unit.k_count, d,
                  1.0f);
    }
  }
}

}  // namespace muster::cpu
