// Forward moves 2 activations an element. Backward: tokens are sorted by (id, n), every run of
// equal ids is summed in that order by one thread a column, so nothing is atomic and the result is
// a function of the inputs alone. Long runs (frequent tokens) are cut into pieces whose partial
// sums are added in order.
#include "kernels/cuda/device.h"
#include "kernels/cuda/vec.cuh"
#include "kernels/embedding/embedding.h"

namespace muster::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSortSize = 2048;  // keys sorted by one block
constexpr int kPiece = 32;       // sorted tokens summed by one block
constexpr uint64_t kNoKey = ~uint64_t{0};

template <typename T, int W>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(T* out, const T* weight, const int32_t* ids, int64_t tokens, int64_t width) {
  const int64_t packs = width / W;
  for (int64_t n = blockIdx.x; n < tokens; n += gridDim.x) {
    const T* row = weight + static_cast<int64_t>(ids[n]) * width;
    for (int64_t p = threadIdx.x; p < packs; p += blockDim.x) {
      Pack<T, W>::load(row + p * W).store(out + n * width + p * W);
    }
  }
}

// Sorts keys (id << 32 | n) of a block's tokens: a bitonic network in shared memory.
__global__ void __launch_bounds__(kSortSize / 2)
    sort_kernel(uint64_t* keys, const int32_t* ids, int64_t tokens) {
  __shared__ uint64_t shared[kSortSize];
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kSortSize;
  for (int i = threadIdx.x; i < kSortSize; i += blockDim.x) {
    const int64_t n = begin + i;
    shared[i] =
        n < tokens ? static_cast<uint64_t>(static_cast<uint32_t>(ids[n])) << 32 | n : kNoKey;
  }
  for (int size = 2; size <= kSortSize; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      __syncthreads();
      const int i = 2 * threadIdx.x - (threadIdx.x & (stride - 1));
      const bool ascending = (i & size) == 0;
      const uint64_t a = shared[i];
      const uint64_t b = shared[i + stride];
      if ((a > b) == ascending) {
        shared[i] = b;
        shared[i + stride] = a;
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kSortSize; i += blockDim.x) keys[begin + i] = shared[i];
}

// Keys are unique, so a key's place is its place in its own block plus the number of smaller keys
// in every other block.
__global__ void __launch_bounds__(kThreads)
    merge_kernel(uint64_t* sorted, const uint64_t* keys, int64_t tokens, int blocks) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const uint64_t key = keys[at];
  if (key == kNoKey) return;
  const int own = static_cast<int>(at / kSortSize);
  int64_t rank = at % kSortSize;
  for (int other = 0; other < blocks; ++other) {
    if (other == own) continue;
    const uint64_t* list = keys + static_cast<int64_t>(other) * kSortSize;
    int low = 0;
    int high = kSortSize;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (list[middle] < key) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    rank += low;
  }
  sorted[rank] = key;
}

// partial [pieces, 2, width]: [0] the sum of the run that began before the piece, [1] of the run
// that goes on after it (and began in it). Runs that lie inside the piece are added to their row.
template <typename T, int W>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(float* grad_weight, float* partial, const T* grad_out, const uint64_t* sorted,
               int64_t tokens, int64_t width) {
  __shared__ uint64_t keys[kPiece + 2];  // the piece and its two neighbours
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kPiece;
  const int count = static_cast<int>(tokens - begin < kPiece ? tokens - begin : kPiece);
  if (threadIdx.x < count + 2) {
    const int64_t at = begin + threadIdx.x - 1;
    keys[threadIdx.x] = at >= 0 && at < tokens ? sorted[at] : kNoKey;
  }
  __syncthreads();
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * W;
  if (column >= width) return;
  const auto row = [&](int i) {
    const auto n = static_cast<int64_t>(keys[i] & 0xffffffffu);
    return Pack<T, W>::load(grad_out + n * width + column);
  };
  float sum[W] = {};
  bool began_before = keys[0] != kNoKey && keys[0] >> 32 == keys[1] >> 32;
  Pack<T, W> next = row(1);
  for (int i = 1; i <= count; ++i) {
    const Pack<T, W> pack = next;
    if (i < count) next = row(i + 1);
#pragma unroll
    for (int k = 0; k < W; ++k) sum[k] += pack.x[k];
    const bool run_goes_on = keys[i + 1] != kNoKey && keys[i + 1] >> 32 == keys[i] >> 32;
    if (run_goes_on && i < count) continue;
    if (began_before || run_goes_on) {
      float* to = partial + (static_cast<int64_t>(blockIdx.x) * 2 + !began_before) * width + column;
#pragma unroll
      for (int k = 0; k < W; ++k) to[k] = sum[k];
    } else {
      float* to = grad_weight + static_cast<int64_t>(keys[i] >> 32) * width + column;
#pragma unroll
      for (int k = 0; k < W; ++k) to[k] += sum[k];
    }
    began_before = false;
#pragma unroll
    for (int k = 0; k < W; ++k) sum[k] = 0.0f;
  }
}

// Adds up the runs that cross pieces; the block of the piece where a run begins does it.
__global__ void __launch_bounds__(kThreads)
    join_kernel(float* grad_weight, const float* partial, const uint64_t* sorted, int64_t tokens,
                int64_t width) {
  const int64_t piece = blockIdx.x;
  const int64_t next = (piece + 1) * kPiece;  // the first token after the piece
  if (next >= tokens) return;
  const uint64_t id = sorted[next] >> 32;
  if (sorted[next - 1] >> 32 != id) return;
  const int64_t begin = piece * kPiece;
  // A run that fills the piece and began before it belongs to an earlier block.
  if (begin > 0 && sorted[begin - 1] >> 32 == id) return;
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (column >= width) return;
  float sum = partial[(piece * 2 + 1) * width + column];
  for (int64_t other = piece + 1; other * kPiece < tokens; ++other) {
    if (sorted[other * kPiece] >> 32 != id) break;
    sum += partial[other * 2 * width + column];
  }
  grad_weight[static_cast<int64_t>(id) * width + column] += sum;
}

}  // namespace

void embedding_forward(const Stream& stream, TensorView out, ConstTensorView weight,
                       ConstTensorView ids) {
  const int64_t tokens = out.size(0);
  const int64_t width = out.size(1);
  if (tokens == 0) return;
  with_activation(out.dtype(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kWidth = 16 / sizeof(T);
    const auto launch = [&](auto kernel) {
      kernel<<<static_cast<unsigned>(tokens), kThreads, 0, handle_of(stream)>>>(
          static_cast<T*>(out.raw()), static_cast<const T*>(weight.raw()), ids.data<int32_t>(),
          tokens, width);
    };
    if (width % kWidth == 0 && rows_aligned(out) && rows_aligned(weight)) {
      launch(forward_kernel<T, kWidth>);
    } else {
      launch(forward_kernel<T, 1>);
    }
  });
  CUDA_CHECK(cudaGetLastError());
}

void embedding_backward(const Stream& stream, TensorView grad_weight, ConstTensorView grad_out,
                        ConstTensorView ids) {
  const int64_t tokens = grad_out.size(0);
  const int64_t width = grad_out.size(1);
  if (tokens == 0) return;
  const int64_t sort_blocks = ceil_div(tokens, kSortSize);
  const int64_t pieces = ceil_div(tokens, kPiece);
  const int64_t keys_count = sort_blocks * kSortSize;
  auto* keys = static_cast<uint64_t*>(
      workspace(stream, Scratch::kOp,
                2 * keys_count * sizeof(uint64_t) + pieces * 2 * width * sizeof(float)));
  uint64_t* sorted = keys + keys_count;
  auto* partial = reinterpret_cast<float*>(sorted + keys_count);
  sort_kernel<<<static_cast<unsigned>(sort_blocks), kSortSize / 2, 0, handle_of(stream)>>>(
      keys, ids.data<int32_t>(), tokens);
  CUDA_CHECK(cudaGetLastError());
  merge_kernel<<<static_cast<unsigned>(keys_count / kThreads), kThreads, 0, handle_of(stream)>>>(
      sorted, keys, tokens, static_cast<int>(sort_blocks));
  CUDA_CHECK(cudaGetLastError());
  float* to = grad_weight.data<float>();
  with_activation(grad_out.dtype(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kWidth = 16 / sizeof(T);
    const bool vector = width % kWidth == 0 && rows_aligned(grad_out);
    const dim3 grid(static_cast<unsigned>(pieces),
                    static_cast<unsigned>(ceil_div(width, kThreads * (vector ? kWidth : 1))));
    const auto launch = [&](auto kernel) {
      kernel<<<grid, kThreads, 0, handle_of(stream)>>>(
          to, partial, static_cast<const T*>(grad_out.raw()), sorted, tokens, width);
      CUDA_CHECK(cudaGetLastError());
    };
    if (vector) {
      launch(sum_kernel<T, kWidth>);
    } else {
      launch(sum_kernel<T, 1>);
    }
  });
  const dim3 grid(static_cast<unsigned>(pieces), static_cast<unsigned>(ceil_div(width, kThreads)));
  join_kernel<<<grid, kThreads, 0, handle_of(stream)>>>(to, partial, sorted, tokens, width);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace muster::cuda
