// Attention for what the tensor-core kernels do not take: float32, caps, dropout, head dimensions
// over 128 or not a multiple of 8, rows without 16-byte alignment. A warp owns a row (a query, or a
// key and its value), its lanes share the D elements, which lie in shared memory; the other side is
// walked in order.
#include <algorithm>

#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/band.h"
#include "kernels/cuda/vec.cuh"

namespace muster::cuda {
namespace {

constexpr int kMaxWarps = 4;
constexpr int kMaxSharedBytes = 48 << 10;

// What a warp needs to know about its row.
struct Place {
  int begin_q, count_q, begin_k, count_k;
};

// The segment that token n of `cu` lies in.
__device__ Place place_of(const AttentionArgs& a, const int32_t* cu, int64_t n) {
  int low = 0;
  int high = a.segments;  // the last s with cu[s] <= n
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (cu[middle] <= n) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return {a.cu_q[low], a.cu_q[low + 1] - a.cu_q[low], a.cu_k[low], a.cu_k[low + 1] - a.cu_k[low]};
}

__device__ Band band_of(const AttentionArgs& a, const Place& place) {
  return {place.count_q, place.count_k, a.left, a.right};
}

// The score of a product of query and key, and its derivative by scale · product.
struct Score {
  float value;
  float slope;
};
__device__ Score score_of(const AttentionArgs& a, float product) {
  const float s = a.scale * product;
  if (a.cap == 0.0f) return {s, 1.0f};
  const float t = tanhf(s / a.cap);
  return {a.cap * t, (1.0f - t) * (1.0f + t)};
}

// What dropout multiplies a probability by; query and key as packed rows.
__device__ float mask_of(const AttentionArgs& a, int64_t query, int head, int64_t key) {
  if (!a.mask.active()) return 1.0f;
  return a.mask.keeps(query, head, key) ? a.mask.scale() : 0.0f;
}

template <typename T>
__device__ T* row_of(const HeadView& view, int64_t token, int64_t head) {
  return static_cast<T*>(view.data) + token * view.row + head * view.head;
}

template <typename T>
__device__ float dot(const float* x, const T* y, int width) {
  float sum = 0.0f;
  for (int d = threadIdx.x % 32; d < width; d += 32) sum = fmaf(x[d], to_float(y[d]), sum);
  return warp_sum(sum);
}

// This warp's `arrays` arrays of a.width floats.
__device__ float* scratch_of(const AttentionArgs& a, int arrays) {
  extern __shared__ float shared[];
  return shared + threadIdx.x / 32 * arrays * a.width;
}

template <typename T>
__device__ void load_row(float* to, const T* from, int width) {
  for (int d = threadIdx.x % 32; d < width; d += 32) to[d] = to_float(from[d]);
}

template <typename T>
__global__ void forward_kernel(const __grid_constant__ AttentionArgs a) {
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  const int64_t n = index / a.heads_q;
  const int head = static_cast<int>(index % a.heads_q);
  if (n >= a.total_q) return;
  const int head_k = head / (a.heads_q / a.heads_k);
  const Place place = place_of(a, a.cu_q, n);
  float* q = scratch_of(a, 2);
  float* acc = q + a.width;
  load_row(q, row_of<const T>(a.q, n, head), a.width);
  const int lane = threadIdx.x % 32;
  for (int d = lane; d < a.width; d += 32) acc[d] = 0.0f;
  __syncwarp();
  const IndexRange keys = band_of(a, place).keys(n - place.begin_q, 1);
  float max = -INFINITY;
  float sum = 0.0f;
  for (int64_t key = place.begin_k + keys.begin; key < place.begin_k + keys.end; ++key) {
    const float s = score_of(a, dot(q, row_of<const T>(a.k, key, head_k), a.width)).value;
    const float top = fmaxf(max, s);
    const float keep = expf(max - top);
    const float p = expf(s - top);
    max = top;
    sum = sum * keep + p;
    const float kept = p * mask_of(a, n, head, key);
    const T* v = row_of<const T>(a.v, key, head_k);
    for (int d = lane; d < a.width; d += 32) acc[d] = acc[d] * keep + kept * to_float(v[d]);
  }
  T* out = row_of<T>(a.out, n, head);
  for (int d = lane; d < a.width; d += 32) {
    out[d] = from_float<T>(keys.empty() ? 0.0f : acc[d] / sum);
  }
  if (lane == 0) a.lse[head * a.total_q + n] = keys.empty() ? -INFINITY : max + logf(sum);
}

template <typename T>
__global__ void query_kernel(const __grid_constant__ AttentionArgs a) {
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  const int64_t n = index / a.heads_q;
  const int head = static_cast<int>(index % a.heads_q);
  if (n >= a.total_q) return;
  const int head_k = head / (a.heads_q / a.heads_k);
  const Place place = place_of(a, a.cu_q, n);
  float* q = scratch_of(a, 3);
  float* grad_out = q + a.width;
  float* acc = grad_out + a.width;
  load_row(q, row_of<const T>(a.q, n, head), a.width);
  load_row(grad_out, row_of<const T>(a.grad_out, n, head), a.width);
  const int lane = threadIdx.x % 32;
  for (int d = lane; d < a.width; d += 32) acc[d] = 0.0f;
  __syncwarp();
  const IndexRange keys = band_of(a, place).keys(n - place.begin_q, 1);
  const float lse = a.lse[head * a.total_q + n];
  const float delta = a.delta[head * a.total_q + n];
  for (int64_t key = place.begin_k + keys.begin; key < place.begin_k + keys.end; ++key) {
    const T* k = row_of<const T>(a.k, key, head_k);
    const Score score = score_of(a, dot(q, k, a.width));
    const float p = expf(score.value - lse);
    const float dp = dot(grad_out, row_of<const T>(a.v, key, head_k), a.width);
    const float ds = p * (dp * mask_of(a, n, head, key) - delta) * score.slope;
    for (int d = lane; d < a.width; d += 32) acc[d] = fmaf(ds, to_float(k[d]), acc[d]);
  }
  T* to = row_of<T>(a.grad_q, n, head);
  for (int d = lane; d < a.width; d += 32) to[d] = from_float<T>(a.scale * acc[d]);
}

template <typename T>
__global__ void key_kernel(const __grid_constant__ AttentionArgs a) {
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  const int64_t n = index / a.heads_k;
  const int head_k = static_cast<int>(index % a.heads_k);
  if (n >= a.total_k) return;
  const int group = a.heads_q / a.heads_k;
  const Place place = place_of(a, a.cu_k, n);
  float* k = scratch_of(a, 4);
  float* v = k + a.width;
  float* grad_k = v + a.width;
  float* grad_v = grad_k + a.width;
  load_row(k, row_of<const T>(a.k, n, head_k), a.width);
  load_row(v, row_of<const T>(a.v, n, head_k), a.width);
  const int lane = threadIdx.x % 32;
  for (int d = lane; d < a.width; d += 32) grad_k[d] = grad_v[d] = 0.0f;
  __syncwarp();
  const IndexRange queries = band_of(a, place).queries(n - place.begin_k, 1);
  for (int head = head_k * group; head < (head_k + 1) * group; ++head) {
    for (int64_t row = place.begin_q + queries.begin; row < place.begin_q + queries.end; ++row) {
      const T* q = row_of<const T>(a.q, row, head);
      const T* grad_out = row_of<const T>(a.grad_out, row, head);
      const Score score = score_of(a, dot(k, q, a.width));
      const float p = expf(score.value - a.lse[head * a.total_q + row]);
      const float mask = mask_of(a, row, head, n);
      const float dp = dot(v, grad_out, a.width) * mask;
      const float ds = p * (dp - a.delta[head * a.total_q + row]) * score.slope;
      for (int d = lane; d < a.width; d += 32) {
        grad_v[d] = fmaf(p * mask, to_float(grad_out[d]), grad_v[d]);
        grad_k[d] = fmaf(ds, to_float(q[d]), grad_k[d]);
      }
    }
  }
  T* to_k = row_of<T>(a.grad_k, n, head_k);
  T* to_v = row_of<T>(a.grad_v, n, head_k);
  for (int d = lane; d < a.width; d += 32) {
    to_k[d] = from_float<T>(a.scale * grad_k[d]);
    to_v[d] = from_float<T>(grad_v[d]);
  }
}

// A warp for each of `rows` rows, with `arrays` rows of floats in shared memory.
template <typename Kernel>
void launch(const Stream& stream, const AttentionArgs& args, Kernel kernel, int64_t rows,
            int arrays) {
  if (rows == 0) return;
  const int warp_bytes = arrays * args.width * static_cast<int>(sizeof(float));
  const int warps = std::clamp(kMaxSharedBytes / warp_bytes, 1, kMaxWarps);
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  warps * warp_bytes));
  kernel<<<static_cast<unsigned>(ceil_div(rows, warps)), 32 * warps, warps * warp_bytes,
           handle_of(stream)>>>(args);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void portable_attention_forward(const Stream& stream, DType dtype, const AttentionArgs& args) {
  with_real(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    launch(stream, args, forward_kernel<T>, args.total_q * args.heads_q, 2);
  });
}

void portable_attention_backward(const Stream& stream, DType dtype, const AttentionArgs& args) {
  with_real(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    launch(stream, args, query_kernel<T>, args.total_q * args.heads_q, 3);
    launch(stream, args, key_kernel<T>, args.total_k * args.heads_k, 4);
  });
}

}  // namespace muster::cuda
