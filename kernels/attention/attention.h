// Flash attention (Dao et al., 2022): softmax(scale · q kᵀ) v tile by tile with an online softmax;
// no T×T buffer, in neither direction.
#pragma once

#include "common/tensor.h"

namespace muster {

// Packed segments: segment s has queries [cu_seqlens_q[s], cu_seqlens_q[s+1]) and keys
// [cu_seqlens_k[s], cu_seqlens_k[s+1]), and attends nowhere else. Segments may be empty. With
// `causal`, query i of a segment of lengths (q, k) sees keys j ≤ i + (k − q): the last query sees
// every key (bottom-right alignment). Values that are not finite may spread to neighbouring
// segments (a GPU copies whole tiles and multiplies what is masked by 0).
struct AttentionOptions {
  float scale = 0.0f;  // 0 = 1 / sqrt(D)
  bool causal = true;
  // Backward only: the same bits in every run. Without it, a GPU may sum grad_q in the order in
  // which its blocks finish, which is faster. The CPU is always deterministic.
  bool deterministic = true;
};
struct Segments {
  ConstTensorView cu_seqlens_q;  // [S + 1] int32, ascending from 0 to Nq
  ConstTensorView cu_seqlens_k;  // [S + 1] int32, ascending from 0 to Nk
  int64_t max_q = 0;             // longest segment, in queries
  int64_t max_k = 0;             // and in keys
};

// out, q [Nq, Hq, D]; k, v [Nk, Hk, D], Hk divides Hq (query head h reads key head h / (Hq/Hk));
// lse [Hq, Nq] float32, natural log of the softmax's denominator: log Σ_j exp(scale · q·k_j). A
// query that sees no key has out 0 and lse −∞. All but lse may be strided views (row and head
// strides free, innermost stride 1).
void attention_forward(const Stream& stream, TensorView out, TensorView lse, ConstTensorView q,
                       ConstTensorView k, ConstTensorView v, const Segments& segments,
                       const AttentionOptions& options);

// Recomputes the probabilities from lse. grad_q, grad_k, grad_v like q, k, v (own strides),
// overwritten; grad_k and grad_v sum over the query heads of their group.
void attention_backward(const Stream& stream, TensorView grad_q, TensorView grad_k,
                        TensorView grad_v, ConstTensorView grad_out, ConstTensorView q,
                        ConstTensorView k, ConstTensorView v, ConstTensorView out,
                        ConstTensorView lse, const Segments& segments,
                        const AttentionOptions& options);

}  // namespace muster
