// Products of float8 numbers for linear layers: each operand is rounded with one scale of its own,
// taken from its largest magnitude, and products accumulate in float32.
//
// Tensor cores take float8 operands only with the summed dimension innermost, so an operand comes
// in two copies, data [R, C] to be summed over C and transposed [C, R] to be summed over R. A layer
// out = x · weightᵀ with x [M, K], weight [N, K] takes x and weight by columns; its grad_x takes
// grad_out by columns and weight by rows; its grad_weight takes grad_out and x by rows:
//
//   const Fp8Operand x8 = fp8_quantise(stream, memory, x, DType::kFloat8E4M3);
//   const Fp8Operand weight8 = fp8_quantise(stream, memory, weight, DType::kFloat8E4M3);
//   fp8_matmul(stream, out, x8.by_columns(), weight8.by_columns(), {.bias = bias});
//   const Fp8Operand grad8 = fp8_quantise(stream, memory, grad_out, DType::kFloat8E5M2);
//   fp8_matmul(stream, grad_x, grad8.by_columns(), weight8.by_rows(), {.exact_sums = true});
//   fp8_matmul(stream, grad_weight, grad8.by_rows(), x8.by_rows(),
//              {.addend = accumulate ? grad_weight : TensorView(), .exact_sums = true});
#pragma once

#include "common/tensor.h"

namespace muster {

// Whether float8 products run there: on GPUs from compute capability 8.9; on the CPU, emulated.
bool fp8_supported(const Device& device);

// Whether the products of an [m, k] by [n, k] layer, forward and backward, can take float8
// operands: all three sizes are positive multiples of 16. Otherwise the layer stays in bfloat16.
bool fp8_fits(int64_t m, int64_t n, int64_t k);

// x = data · scale, rounded to nearest even. Magnitudes of kFloat8E4M3 go up to 448 with 4
// significant bits, those of kFloat8E5M2 to 57344 with 3; amax(x) becomes the largest. x [R, C]
// bfloat16 or float32, R and C multiples of 16, rows may lie apart but begin at multiples of 16
// bytes. data [R, C] and transposed [C, R], contiguous, of the same float8 dtype; either may be
// undefined. scale [1] float32. amax [1] float32 saves a pass over x where its largest magnitude is
// known, as from swiglu. Tensors of amax below 2⁻¹⁰⁰ count as zeros; NaN stays NaN, and with
// an infinity products are NaN or infinite as well.
void fp8_quantise(const Stream& stream, TensorView data, TensorView transposed, TensorView scale,
                  ConstTensorView x, ConstTensorView amax = {});

// One side of a product: data [rows, summed].
struct Fp8View {
  ConstTensorView data;
  ConstTensorView scale;
};

struct Fp8Operand {
  Tensor data;
  Tensor transposed;
  Tensor scale;
  Fp8View by_columns() const { return {data, scale}; }
  Fp8View by_rows() const { return {transposed, scale}; }
};

// The same into new tensors. Copies that nobody will ask for can be left out.
enum class Fp8Copies { kBoth, kData, kTransposed };
Fp8Operand fp8_quantise(const Stream& stream, Allocator& memory, ConstTensorView x, DType format,
                        Fp8Copies copies = Fp8Copies::kBoth, ConstTensorView amax = {});

struct Fp8MatmulOptions {
  ConstTensorView bias = {};    // [N], like out
  ConstTensorView addend = {};  // [M, N], like out; may be out
  // Tensor cores' sums carry about 14 bits; with this, every 128 products or so go into a float32
  // sum instead. Gradients want it, activations do not need it.
  bool exact_sums = false;
};
// out[M, N] = a.scale · b.scale · a.data[M, K] · b.data[N, K]ᵀ + bias + addend. out bfloat16 or
// float32 (the latter without bias); fp8_fits(M, N, K). The formats of a and b may differ, but not
// both be kFloat8E5M2. Throws where the GPU cannot do it (fp8_supported).
void fp8_matmul(const Stream& stream, TensorView out, Fp8View a, Fp8View b,
                const Fp8MatmulOptions& options = {});

}  // namespace muster
