// Forward moves 2 activations an element. Backward: tokens are sorted by id (a stable radix sort
// keeps equal ids in order of n), every run of equal ids is summed in that order by one thread a
// column, so nothing is atomic and the result is a function of the inputs alone. Long runs
// (frequent tokens) are cut into pieces whose partial sums are added in order.
#include <algorithm>
#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "kernels/cuda/device.h"
#include "kernels/cuda/vec.cuh"
#include "kernels/embedding/embedding.h"

namespace muster::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kCopies = 4;
constexpr int kPiece = 32;  // sorted tokens summed by one block
constexpr int kAhead = 4;   // rows in flight for each thread
constexpr uint32_t kNoId = ~uint32_t{0};

// A thread copies kCopies packs, counted through all rows.
template <typename T, int W>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(T* out, const T* weight, const int32_t* ids, int64_t count, uint32_t packs) {
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kThreads * kCopies + threadIdx.x;
  Raw<T, W> data[kCopies];
#pragma unroll
  for (int k = 0; k < kCopies; ++k) {
    const int64_t at = begin + k * kThreads;
    if (at >= count) break;
    const int64_t n = at / packs;
    data[k] = Raw<T, W>::load(weight + (ids[n] * static_cast<int64_t>(packs) + at - n * packs) * W);
  }
#pragma unroll
  for (int k = 0; k < kCopies; ++k) {
    const int64_t at = begin + k * kThreads;
    if (at < count) data[k].store(out + at * W);
  }
}

__global__ void __launch_bounds__(kThreads) count_up_kernel(uint32_t* out, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < n) out[i] = static_cast<uint32_t>(i);
}

// Tokens in order of their ids: ids[i] of token tokens[i].
struct Sorted {
  const uint32_t* ids;
  const uint32_t* tokens;
  int64_t count;
};

// partial [pieces, 2, width]: [0] the sum of the run that began before the piece, [1] of the run
// that goes on after it (and began in it). Runs that lie inside the piece are added to their row.
template <typename T, int W>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(float* grad_weight, float* partial, const T* grad_out, const Sorted sorted,
               int64_t width) {
  __shared__ uint32_t ids[kPiece + 2];  // the piece and its two neighbours
  __shared__ uint32_t tokens[kPiece];
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kPiece;
  const int count = static_cast<int>(min(sorted.count - begin, static_cast<int64_t>(kPiece)));
  for (int i = threadIdx.x; i < count + 2; i += blockDim.x) {
    const int64_t at = begin + i - 1;
    ids[i] = at >= 0 && at < sorted.count ? sorted.ids[at] : kNoId;
    if (i < count) tokens[i] = sorted.tokens[begin + i];
  }
  __syncthreads();
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * W;
  if (column >= width) return;
  float sum[W] = {};
  bool began_before = ids[0] == ids[1];
  for (int first = 0; first < count; first += kAhead) {
    Pack<T, W> rows[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int i = min(first + k, count - 1);
      rows[k] = Pack<T, W>::load(grad_out + static_cast<int64_t>(tokens[i]) * width + column);
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int i = first + k;
      if (i >= count) break;
#pragma unroll
      for (int c = 0; c < W; ++c) sum[c] += rows[k].x[c];
      const uint32_t id = ids[i + 1];
      const bool run_goes_on = ids[i + 2] == id;
      if (run_goes_on && i + 1 < count) continue;
      if (began_before || run_goes_on) {
        const int64_t slot = static_cast<int64_t>(blockIdx.x) * 2 + (began_before ? 0 : 1);
#pragma unroll
        for (int c = 0; c < W; ++c) partial[slot * width + column + c] = sum[c];
      } else {
#pragma unroll
        for (int c = 0; c < W; ++c) grad_weight[id * width + column + c] += sum[c];
      }
      began_before = false;
#pragma unroll
      for (int c = 0; c < W; ++c) sum[c] = 0.0f;
    }
  }
}

// Adds up the runs that cross pieces; the block of the piece where a run begins does it.
__global__ void __launch_bounds__(kThreads)
    join_kernel(float* grad_weight, const float* partial, const Sorted sorted, int64_t width) {
  const int64_t piece = blockIdx.x;
  const int64_t begin = piece * kPiece;
  const int64_t next = begin + kPiece;  // the first token after the piece
  if (next >= sorted.count) return;
  const uint32_t id = sorted.ids[next];
  if (sorted.ids[next - 1] != id) return;
  // A run that fills the piece and began before it belongs to an earlier block.
  if (begin > 0 && sorted.ids[begin - 1] == id) return;
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (column >= width) return;
  int64_t low = next;  // the run's end: the first token of a larger id
  int64_t high = sorted.count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (sorted.ids[middle] == id) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  const int64_t pieces = (low + kPiece - 1) / kPiece;
  float sum = partial[(piece * 2 + 1) * width + column];
#pragma unroll 8
  for (int64_t other = piece + 1; other < pieces; ++other) {
    sum += partial[other * 2 * width + column];
  }
  grad_weight[id * width + column] += sum;
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
    const bool vector = width % kWidth == 0 && rows_aligned(out) && rows_aligned(weight);
    const int64_t packs = width / (vector ? kWidth : 1);
    const auto launch = [&](auto kernel) {
      kernel<<<static_cast<unsigned>(ceil_div(tokens * packs, kThreads * kCopies)), kThreads, 0,
               handle_of(stream)>>>(static_cast<T*>(out.raw()), static_cast<const T*>(weight.raw()),
                                    ids.data<int32_t>(), tokens * packs,
                                    static_cast<uint32_t>(packs));
    };
    if (vector) {
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
  const int64_t pieces = ceil_div(tokens, kPiece);
  const auto bits = std::bit_width(static_cast<uint64_t>(grad_weight.size(0)));
  const auto* keys = reinterpret_cast<const uint32_t*>(ids.data<int32_t>());
  size_t sort_bytes = 0;
  uint32_t* const none = nullptr;
  CUDA_CHECK(cub::DeviceRadixSort::SortPairs(nullptr, sort_bytes, keys, none, none, none, tokens, 0,
                                             bits, handle_of(stream)));
  // One block: partial sums, the three lists, and what the sort needs for itself.
  const int64_t partial_bytes = pieces * 2 * width * static_cast<int64_t>(sizeof(float));
  const int64_t list_bytes = ceil_div(tokens * sizeof(uint32_t), 256) * 256;
  auto* memory = static_cast<char*>(workspace(
      stream, Scratch::kOp,
      ceil_div(partial_bytes, 256) * 256 + 3 * list_bytes + static_cast<int64_t>(sort_bytes)));
  auto* partial = reinterpret_cast<float*>(memory);
  char* lists = memory + ceil_div(partial_bytes, 256) * 256;
  auto* in_order = reinterpret_cast<uint32_t*>(lists);
  auto* sorted_ids = reinterpret_cast<uint32_t*>(lists + list_bytes);
  auto* sorted_tokens = reinterpret_cast<uint32_t*>(lists + 2 * list_bytes);
  count_up_kernel<<<static_cast<unsigned>(ceil_div(tokens, kThreads)), kThreads, 0,
                    handle_of(stream)>>>(in_order, tokens);
  CUDA_CHECK(cudaGetLastError());
  CUDA_CHECK(cub::DeviceRadixSort::SortPairs(lists + 3 * list_bytes, sort_bytes, keys, sorted_ids,
                                             in_order, sorted_tokens, tokens, 0, bits,
                                             handle_of(stream)));
  const Sorted sorted{sorted_ids, sorted_tokens, tokens};
  float* to = grad_weight.data<float>();
  with_activation(grad_out.dtype(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kWidth = 16 / sizeof(T);
    const bool vector = width % kWidth == 0 && rows_aligned(grad_out);
    const int64_t packs = width / (vector ? kWidth : 1);
    const int threads = static_cast<int>(std::min<int64_t>(ceil_div(packs, 32) * 32, kThreads));
    const dim3 grid(static_cast<unsigned>(pieces), static_cast<unsigned>(ceil_div(packs, threads)));
    const auto launch = [&](auto kernel) {
      kernel<<<grid, threads, 0, handle_of(stream)>>>(
          to, partial, static_cast<const T*>(grad_out.raw()), sorted, width);
      CUDA_CHECK(cudaGetLastError());
    };
    if (vector) {
      launch(sum_kernel<T, kWidth>);
    } else {
      launch(sum_kernel<T, 1>);
    }
  });
  const dim3 grid(static_cast<unsigned>(pieces), static_cast<unsigned>(ceil_div(width, kThreads)));
  join_kernel<<<grid, kThreads, 0, handle_of(stream)>>>(to, partial, sorted, width);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace muster::cuda
