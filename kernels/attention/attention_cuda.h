// Between attention_cuda.cu, which chooses, and the files that compute.
#pragma once

#include <cstdint>

#include "common/tensor.h"
#include "kernels/attention/dropout_mask.h"

namespace muster::cuda {

// A [tokens, heads, D] operand: element strides of tokens and heads.
struct HeadView {
  void* data = nullptr;
  int64_t row = 0;
  int64_t head = 0;

  HeadView() = default;
  template <typename Void>
  explicit HeadView(const BasicTensorView<Void>& view)
      : data(const_cast<void*>(static_cast<const void*>(view.raw()))),
        row(view.stride(0)),
        head(view.stride(1)) {}
};

// Everything the kernels take, by value.
struct AttentionArgs {
  HeadView q, k, v, out;
  HeadView grad_out, grad_q, grad_k, grad_v;  // backward only
  float* lse = nullptr;                       // [Hq, Nq]
  float* delta = nullptr;                     // [Hq, Nq]: Σ_d grad_out · out, backward only
  const int32_t* cu_q = nullptr;
  const int32_t* cu_k = nullptr;
  int64_t total_q = 0;
  int64_t total_k = 0;
  int segments = 0;
  int max_q = 0;
  int max_k = 0;
  int heads_q = 0;
  int heads_k = 0;
  int width = 0;  // D
  float scale = 0.0f;
  // What attention_choice.h leaves out of a kernel's calls, the kernel need not look at.
  bool causal = false;
  int left = 0;   // keys seen before a query's position and behind it, kUnbounded if all (band.h);
  int right = 0;  // 0 if causal
  float cap = 0.0f;
  DropoutMask mask;
};

// bf16 or fp16, D a multiple of 8 up to 128, every row 16-byte aligned; windows.
void mma_attention_forward(const Stream& stream, DType dtype, const AttentionArgs& args);
void mma_attention_backward(const Stream& stream, DType dtype, const AttentionArgs& args);

// bf16, D 64 or 128, rows as above, some queries and some keys, on a GPU where hopper_available();
// causal or all. `deterministic`: see AttentionOptions.
bool hopper_available();
void hopper_attention_forward(const Stream& stream, const AttentionArgs& args);
void hopper_attention_backward(const Stream& stream, const AttentionArgs& args, bool deterministic);

// Everything: any D, float32, bf16 or fp16, any alignment, windows, cap, dropout: a warp a row,
// without tensor cores.
void portable_attention_forward(const Stream& stream, DType dtype, const AttentionArgs& args);
void portable_attention_backward(const Stream& stream, DType dtype, const AttentionArgs& args);

}  // namespace muster::cuda
