// The head is taken for a chunk of tokens at a time: their logits over the whole vocabulary lie in
// scratch memory in the activations' dtype, one kernel turns them into losses and, in place, into
// gradients, and two products carry those on. Chunks are as large as the workspace allows, because
// each one reads and writes the whole weight gradient.
#include <algorithm>

#include "kernels/cross_entropy/cross_entropy.h"
#include "kernels/cross_entropy/softmax_cuda.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/vec.cuh"
#include "kernels/matmul/matmul.h"

namespace muster::cuda {
namespace {

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
    softmax_loss(stream, losses + begin, logits, targets.slice(begin, end), options.ignore_index,
                 gradient);
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
