// Flash attention (Dao et al., 2022): softmax(scale · q kᵀ) v tile by tile with an online softmax;
// no T×T buffer, in neither direction.
#pragma once

#include "common/tensor.h"

namespace muster {

// Packed segments: segment s has queries [cu_seqlens_q[s], cu_seqlens_q[s+1]) and keys
// [cu_seqlens_k[s], cu_seqlens_k[s+1]), and attends nowhere else. Segments may be empty. Query i of
// a segment of lengths (q, k) lies at key p = i + (k − q): the last query at the last key
// (bottom-right alignment). It sees the keys j with
//
//   p − window_left ≤ j ≤ p + window_right,   with `causal` also j ≤ p,
//
// and work follows what is seen. Values that are not finite may spread to neighbouring segments and
// to queries that do not see them (whole tiles are multiplied, what is masked by 0).
struct AttentionOptions {
  float scale = 0.0f;  // 0 = 1 / sqrt(D)
  bool causal = true;
  // Backward only: the same bits in every run. Without it, a GPU may sum grad_q in the order in
  // which its blocks finish, which is faster. The CPU is always deterministic.
  bool deterministic = true;
  // Sliding window (Beltagy et al., Longformer, 2020; as in Mistral 7B, 2023): keys that a query
  // sees before and behind its own position; -1 = as many as there are.
  int64_t window_left = -1;
  int64_t window_right = -1;
  // Soft cap of the scores (Gemma 2, 2024): s → cap · tanh(s / cap), s = scale · q·k, before
  // anything is masked; 0 = none.
  float logit_cap = 0.0f;
  // Each probability becomes 0 with this probability, in [0, 1), else it is multiplied by
  // 1 / (1 − dropout). Which ones is a pure function of seed, packed row of the query, head of the
  // query and packed row of the key (dropout_mask.h), the same in forward and backward and on every
  // device. The seed should differ for every step and layer. The offset is added to all rows:
  // where the first row lies in a larger batch that is computed in parts, so that its mask does not
  // depend on the parts. Rows with the offset lie below 2⁴⁸, heads below 2¹⁶.
  float dropout = 0.0f;
  uint64_t dropout_seed = 0;
  uint64_t dropout_offset = 0;
};
struct Segments {
  ConstTensorView cu_seqlens_q;  // [S + 1] int32, ascending from 0 to Nq
  ConstTensorView cu_seqlens_k;  // [S + 1] int32, ascending from 0 to Nk
  int64_t max_q = 0;             // longest segment, in queries
  int64_t max_k = 0;             // and in keys
};

// out, q [Nq, Hq, D]; k, v [Nk, Hk, D], Hk divides Hq (query head h reads key head h / (Hq/Hk));
// all float32, bfloat16 or float16, any D, sums in float32. lse [Hq, Nq] float32, natural log of
// the softmax's denominator over the keys seen: log Σ_j exp(s_j), s_j capped if there is a cap, and
// as without dropout. A query that sees no key has out 0 and lse −∞. All but lse may be strided
// views (row and head strides free, innermost stride 1).
void attention_forward(const Stream& stream, TensorView out, TensorView lse, ConstTensorView q,
                       ConstTensorView k, ConstTensorView v, const Segments& segments,
                       const AttentionOptions& options);

// Recomputes the probabilities P from lse, and the mask M (1 / (1 − dropout) or 0) from its key:
//   grad_v = (P ∘ M)ᵀ grad_out,   grad_s = P ∘ (M ∘ (grad_out vᵀ) − Σ_d grad_out ∘ out),
// times 1 − (s / cap)² if there is a cap (s capped). `options` are the forward's. grad_q, grad_k,
// grad_v like q, k, v (own strides), overwritten; grad_k and grad_v sum over the query heads of
// their group.
void attention_backward(const Stream& stream, TensorView grad_q, TensorView grad_k,
                        TensorView grad_v, ConstTensorView grad_out, ConstTensorView q,
                        ConstTensorView k, ConstTensorView v, ConstTensorView out,
                        ConstTensorView lse, const Segments& segments,
                        const AttentionOptions& options);

}  // namespace muster
