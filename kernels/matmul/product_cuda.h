// One product as cuBLASLt takes it: what matmul.h, fp8.h and their fused forms are made of.
#pragma once

#include "common/tensor.h"

namespace muster::cuda {

// What happens to a sum before it is written.
enum class Epilogue : uint8_t {
  kNone,
  kGelu,          // hidden = sum, out = gelu(sum)
  kGeluBackward,  // out = sum · gelu′(hidden)
};

// out[m, n] = epilogue(scale_a · scale_b · op(a) · op(b) + addend + bias). Rows may lie apart.
struct Product {
  TensorView out;
  ConstTensorView a;
  ConstTensorView b;
  bool transpose_a = false;
  bool transpose_b = false;
  ConstTensorView addend = {};  // like out, and may be out; undefined: none
  const void* bias = nullptr;   // [n] in out's dtype
  Epilogue epilogue = Epilogue::kNone;
  TensorView hidden = {};          // like out, and not out
  const float* scale_a = nullptr;  // [1] on the device; of float8 operands only
  const float* scale_b = nullptr;
  bool fast_accumulate = false;  // float8: fewer bits in the tensor cores' sums
};

// Enqueues the product; false where cuBLASLt has no kernel for it (then nothing happened). The
// first call of a shape chooses its algorithm: see set_matmul_measured.
bool multiply(const Stream& stream, const Product& product);

// True if `fused` shall be used for this product, false for `parts`, which do the same in several
// launches. Measured once a shape, like algorithms, by calling both; true where that is off.
bool fused_pays(const Stream& stream, const Product& product,
                bool (*fused)(const Stream&, const Product&),
                bool (*parts)(const Stream&, const Product&));

}  // namespace muster::cuda
