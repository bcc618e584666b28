// The head is taken for a chunk of tokens at a time: their logits over the whole vocabulary lie in
// scratch memory in the activations' dtype, one kernel turns them into losses and, in place, into
// gradients, and two products carry those on. Chunks are as large as the workspace allows, because
// each one reads and writes the whole weight gradient.
#include <algorithm>

#include "kernels/cross_entropy/cross_entropy.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/vec.cuh"
#include "kernels/matmul/matmul.h"

namespace muster::cuda {
namespace {

constexpr int kThreads = 512;

// Maximum and Σ exp(x − maximum) of a set of numbers.
struct LogSum {
  float max = -INFINITY;
  float sum = 0.0f;
};

__device__ LogSum merge(const LogSum& a, const LogSum& b) {
  const float max = fmaxf(a.max, b.max);
  if (max == -INFINITY) return {};
  return {max, a.sum * __expf(a.max - max) + b.sum * __expf(b.max - max)};
}

// One block a token: losses[n] = lse − z[target], or 0 where the target is ignored; with kGradient
// z becomes softmax(z) − onehot(target), or 0.
template <typename T, int W, bool kGradient>
__global__ void __launch_bounds__(kThreads)
    softmax_kernel(float* losses, T* logits, const int32_t* targets, int64_t vocab,
                   int32_t ignore_index) {
  __shared__ LogSum scratch[kThreads / 32];
  T* row = logits + blockIdx.x * vocab;
  const int32_t target = targets[blockIdx.x];
  const int64_t packs = vocab / W;
  if (target == ignore_index) {
    if (threadIdx.x == 0) losses[blockIdx.x] = 0.0f;
    if constexpr (kGradient) {
      const Pack<T, W> zero{};
      for (int64_t p = threadIdx.x; p < packs; p += kThreads) zero.store(row + p * W);
    }
    return;
  }
  LogSum mine;
#pragma unroll 2
  for (int64_t p = threadIdx.x; p < packs; p += kThreads) {
    const auto pack = Pack<T, W>::load(row + p * W);
    float max = pack.x[0];
#pragma unroll
    for (int i = 1; i < W; ++i) max = fmaxf(max, pack.x[i]);
    if (max > mine.max) {
      mine.sum *= __expf(mine.max - max);
      mine.max = max;
    }
#pragma unroll
    for (int i = 0; i < W; ++i) mine.sum += __expf(pack.x[i] - mine.max);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const LogSum other{__shfl_xor_sync(0xffffffffu, mine.max, offset),
                       __shfl_xor_sync(0xffffffffu, mine.sum, offset)};
    mine = threadIdx.x & offset ? merge(other, mine) : merge(mine, other);
  }
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = mine;
  __syncthreads();
  LogSum all;
  for (int i = 0; i < kThreads / 32; ++i) all = merge(all, scratch[i]);
  const float lse = all.max + logf(all.sum);
  if (threadIdx.x == 0) losses[blockIdx.x] = lse - to_float(row[target]);
  if constexpr (kGradient) {
    __syncthreads();  // the target's logit has been read
#pragma unroll 2
    for (int64_t p = threadIdx.x; p < packs; p += kThreads) {
      auto pack = Pack<T, W>::load(row + p * W);
#pragma unroll
      for (int i = 0; i < W; ++i) {
        pack.x[i] = __expf(pack.x[i] - lse) - (p * W + i == target ? 1.0f : 0.0f);
      }
      pack.store(row + p * W);
    }
  }
}

__global__ void __launch_bounds__(1024)
    sum_kernel(double* loss_sum, const float* losses, int64_t tokens) {
  __shared__ double scratch[32];
  double mine = 0.0;
  for (int64_t n = threadIdx.x; n < tokens; n += 1024) mine += losses[n];
  const double total = block_sum(mine, scratch);
  if (threadIdx.x == 0) *loss_sum += total;
}

// The undefined gradients leave the gradients out.
void run(const Stream& stream, TensorView loss_sum, TensorView grad_hidden, TensorView grad_weight,
         ConstTensorView hidden, ConstTensorView weight, ConstTensorView targets,
         const CrossEntropyOptions& options) {
  const int64_t tokens = hidden.size(0);
  const int64_t vocab = weight.size(0);
  const bool gradient = grad_weight.defined();
  if (tokens == 0) {
    if (gradient && !options.accumulate_weight) {  // an empty sum
      matmul(stream, grad_weight, weight.narrow(1, 0, 0), hidden);
    }
    return;
  }
  const DType dtype = hidden.dtype();
  const int64_t row_bytes = vocab * static_cast<int64_t>(size_of(dtype));
  // Whole tiles of the matrix products where there is room for them.
  int64_t chunk = std::clamp<int64_t>(options.gpu_workspace_bytes / row_bytes, 1, tokens);
  if (chunk > 128 && chunk < tokens) chunk = chunk / 128 * 128;
  const int64_t loss_bytes = ceil_div(tokens * sizeof(float), 256) * 256;
  auto* scratch =
      static_cast<char*>(workspace(stream, Scratch::kOp, loss_bytes + chunk * row_bytes));
  auto* losses = reinterpret_cast<float*>(scratch);

  for (int64_t begin = 0; begin < tokens; begin += chunk) {
    const int64_t end = std::min(tokens, begin + chunk);
    const TensorView logits(scratch + loss_bytes, dtype, {end - begin, vocab}, stream.device);
    matmul(stream, logits, hidden.slice(begin, end), weight, {.transpose_b = true});
    with_activation(dtype, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      constexpr int kWidth = 16 / sizeof(T);
      const auto launch = [&](auto kernel) {
        kernel<<<static_cast<unsigned>(end - begin), kThreads, 0, handle_of(stream)>>>(
            losses + begin, static_cast<T*>(logits.raw()), targets.data<int32_t>() + begin, vocab,
            options.ignore_index);
        CUDA_CHECK(cudaGetLastError());
      };
      if (vocab % kWidth == 0) {
        gradient ? launch(softmax_kernel<T, kWidth, true>)
                 : launch(softmax_kernel<T, kWidth, false>);
      } else {
        gradient ? launch(softmax_kernel<T, 1, true>) : launch(softmax_kernel<T, 1, false>);
      }
    });
    if (gradient) {
      matmul(stream, grad_hidden.slice(begin, end), logits, weight);
      matmul(stream, grad_weight, logits, hidden.slice(begin, end),
             {.transpose_a = true, .accumulate = begin > 0 || options.accumulate_weight});
    }
  }
  sum_kernel<<<1, 1024, 0, handle_of(stream)>>>(loss_sum.data<double>(), losses, tokens);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void linear_cross_entropy_forward(const Stream& stream, TensorView loss_sum, ConstTensorView hidden,
                                  ConstTensorView weight, ConstTensorView targets,
                                  const CrossEntropyOptions& options) {
  run(stream, loss_sum, {}, {}, hidden, weight, targets, options);
}

void linear_cross_entropy_train(const Stream& stream, TensorView loss_sum, TensorView grad_hidden,
                                TensorView grad_weight, ConstTensorView hidden,
                                ConstTensorView weight, ConstTensorView targets,
                                const CrossEntropyOptions& options) {
  run(stream, loss_sum, grad_hidden, grad_weight, hidden, weight, targets, options);
}

}  // namespace muster::cuda
