// Asks attention_choice.h which kernels serve a call, and hands it to them.
#include <algorithm>

#include "kernels/attention/attention.h"
#include "kernels/attention/attention_choice.h"
#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/band.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/vec.cuh"

namespace muster::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 16;  // threads of a row

// delta[h, n] = Σ_d grad_out[n, h, d] · out[n, h, d].
template <typename T, int W>
__global__ void __launch_bounds__(kThreads) delta_kernel(const AttentionArgs a) {
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
  const int64_t n = index / a.heads_q;
  const int64_t h = index - n * a.heads_q;
  float sum = 0.0f;
  if (n < a.total_q) {
    const T* out = static_cast<const T*>(a.out.data) + n * a.out.row + h * a.out.head;
    const T* grad =
        static_cast<const T*>(a.grad_out.data) + n * a.grad_out.row + h * a.grad_out.head;
    for (int d = threadIdx.x % kLanes * W; d < a.width; d += kLanes * W) {
      const auto x = Pack<T, W>::load(out + d);
      const auto y = Pack<T, W>::load(grad + d);
#pragma unroll
      for (int i = 0; i < W; ++i) sum = fmaf(x.x[i], y.x[i], sum);
    }
  }
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }
  if (n < a.total_q && threadIdx.x % kLanes == 0) a.delta[h * a.total_q + n] = sum;
}

AttentionArgs args_of(ConstTensorView q, ConstTensorView k, ConstTensorView v, ConstTensorView out,
                      ConstTensorView lse, const Segments& segments,
                      const AttentionOptions& options) {
  AttentionArgs args;
  args.q = HeadView(q);
  args.k = HeadView(k);
  args.v = HeadView(v);
  args.out = HeadView(out);
  args.lse = const_cast<float*>(lse.data<float>());
  args.cu_q = segments.cu_seqlens_q.data<int32_t>();
  args.cu_k = segments.cu_seqlens_k.data<int32_t>();
  args.total_q = q.size(0);
  args.total_k = k.size(0);
  args.segments = static_cast<int>(segments.cu_seqlens_q.size(0)) - 1;
  args.max_q = static_cast<int>(segments.max_q);
  args.max_k = static_cast<int>(segments.max_k);
  args.heads_q = static_cast<int>(q.size(1));
  args.heads_k = static_cast<int>(k.size(1));
  args.width = static_cast<int>(q.size(2));
  args.scale = options.scale;
  args.causal = options.causal;
  const auto bound = [](int64_t window) {
    return static_cast<int>(window < 0 ? kUnbounded : std::min(window, kUnbounded));
  };
  args.left = bound(options.window_left);
  args.right = options.causal ? 0 : bound(options.window_right);
  args.cap = options.logit_cap;
  args.mask = DropoutMask(options.dropout, options.dropout_seed, options.dropout_offset);
  return args;
}

// `views` are all operands of [tokens, heads, D].
template <typename... Views>
AttentionKernels kernels_for(const AttentionArgs& args, const AttentionOptions& options,
                             DType dtype, const Views&... views) {
  const AttentionChoice choice =
      choose_attention_kernels({.dtype = dtype,
                                .width = args.width,
                                .aligned = (rows_aligned(views) && ...),
                                .mappable = args.total_q > 0 && args.total_k > 0 &&
                                            ((views.stride(0) > 0 && views.stride(1) > 0) && ...),
                                .hopper = hopper_available(),
                                .options = options});
  log_attention_choice(choice);
  return choice.kernels;
}

}  // namespace

void attention_forward(const Stream& stream, TensorView out, TensorView lse, ConstTensorView q,
                       ConstTensorView k, ConstTensorView v, const Segments& segments,
                       const AttentionOptions& options) {
  if (q.numel() == 0) return;
  const AttentionArgs args = args_of(q, k, v, out, lse, segments, options);
  switch (kernels_for(args, options, q.dtype(), q, k, v, out)) {
    case AttentionKernels::kHopper:
      return hopper_attention_forward(stream, args);
    case AttentionKernels::kMma:
      return mma_attention_forward(stream, q.dtype(), args);
    case AttentionKernels::kPortable:
      return portable_attention_forward(stream, q.dtype(), args);
  }
}

void attention_backward(const Stream& stream, TensorView grad_q, TensorView grad_k,
                        TensorView grad_v, ConstTensorView grad_out, ConstTensorView q,
                        ConstTensorView k, ConstTensorView v, ConstTensorView out,
                        ConstTensorView lse, const Segments& segments,
                        const AttentionOptions& options) {
  AttentionArgs args = args_of(q, k, v, out, lse, segments, options);
  args.grad_out = HeadView(grad_out);
  args.grad_q = HeadView(grad_q);
  args.grad_k = HeadView(grad_k);
  args.grad_v = HeadView(grad_v);
  const AttentionKernels kernels =
      kernels_for(args, options, q.dtype(), q, k, v, out, grad_out, grad_q, grad_k, grad_v);
  if (kernels == AttentionKernels::kHopper) {
    return hopper_attention_backward(stream, args, options.deterministic);
  }
  const int64_t rows = args.total_q * args.heads_q;
  args.delta = static_cast<float*>(workspace(stream, Scratch::kOp, (rows + 1) * sizeof(float)));
  const bool tensor_cores = kernels == AttentionKernels::kMma;
  if (rows > 0) {
    const auto blocks = static_cast<unsigned>(ceil_div(rows * kLanes, kThreads));
    with_real(q.dtype(), [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      const auto kernel = tensor_cores ? delta_kernel<T, 16 / sizeof(T)> : delta_kernel<T, 1>;
      kernel<<<blocks, kThreads, 0, handle_of(stream)>>>(args);
    });
    CUDA_CHECK(cudaGetLastError());
  }
  if (tensor_cores) {
    mma_attention_backward(stream, q.dtype(), args);
  } else {
    portable_attention_backward(stream, q.dtype(), args);
  }
}

}  // namespace muster::cuda
