// Matrix products. Row-major; the innermost stride is 1, the row stride may be larger (views into
// merged matrices).
#pragma once

#include "common/tensor.h"

namespace muster {

// out[M, N] = op(a) · op(b), or += when `accumulate`. op transposes when its flag is set: a is [M,
// K] ([K, M] if transpose_a), b is [K, N] ([N, K] if transpose_b). Products and sums are
// accumulated in float32. `out` overlaps neither input and has their dtype or, on CUDA, float32.
struct MatmulOptions {
  bool transpose_a = false;
  bool transpose_b = false;
  bool accumulate = false;
};
void matmul(const Stream& stream, TensorView out, ConstTensorView a, ConstTensorView b,
            const MatmulOptions& options = {});

// How the algorithm of a shape that is new to a GPU is chosen. Measured (the default): cuBLASLt's
// candidates are timed when a shape is first seen, which waits for the GPU that once; the choice
// may differ between processes, and so may the last bits of the results. Not measured: the
// heuristic's first, the same in every process with this library and GPU, which deterministic runs
// want. A stream that is being captured never measures.
void set_matmul_measured(bool measured);

// A linear layer with weight [N, K] (output features first, as in PyTorch): out[M, N] = x[M, K] ·
// weightᵀ + bias[N] + residual[M, N]. `bias` and `residual` may be undefined; `residual` may be
// `out`.
void linear_forward(const Stream& stream, TensorView out, ConstTensorView x, ConstTensorView weight,
                    ConstTensorView bias = {}, ConstTensorView residual = {});

// hidden = x · weightᵀ + bias; out = gelu(hidden), GELU as in gelu/gelu.h. hidden, out [M, N],
// contiguous. `bias` may be undefined.
void linear_gelu_forward(const Stream& stream, TensorView out, TensorView hidden, ConstTensorView x,
                         ConstTensorView weight, ConstTensorView bias);

// grad_x[M, K] = grad_out[M, N] · weight;
// grad_weight[N, K] += grad_outᵀ · x (float32), or = unless `accumulate_weight`;
// grad_bias[N] += column sums of grad_out (float32, always accumulates). Undefined results are left
// out.
void linear_backward(const Stream& stream, TensorView grad_x, TensorView grad_weight,
                     TensorView grad_bias, ConstTensorView grad_out, ConstTensorView x,
                     ConstTensorView weight, bool accumulate_weight = true);

// The backward of linear_forward after linear_gelu_forward, as one: x = gelu(hidden) was the input
// of a layer with this weight [N, K]. grad_hidden[M, K] = (grad_out[M, N] · weight) ·
// gelu′(hidden), grad_bias[K] += its column sums (float32) unless undefined. hidden and grad_hidden
// are contiguous; grad_hidden may be hidden, which on a GPU costs another pass over it.
void linear_gelu_backward(const Stream& stream, TensorView grad_hidden, TensorView grad_bias,
                          ConstTensorView grad_out, ConstTensorView weight, ConstTensorView hidden);

}  // namespace muster
