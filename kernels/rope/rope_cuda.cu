// Memory-bound: every element is read and written once; the table stays in the caches.
#include "kernels/cuda/vec.cuh"
#include "kernels/rope/rope.h"

namespace muster::cuda {
namespace {

constexpr int kThreads = 256;

struct Args {
  void* x;
  const float* table;
  const int32_t* positions;
  int64_t stride_n, stride_h;
  int64_t items;  // N · H · (D/2) / W
  uint32_t heads;
  uint32_t half;
  float sign;  // of the angle
};

// One thread turns W neighbouring pairs: elements [i, i + W) and [i + half, i + half + W).
template <typename T, int W>
__global__ void __launch_bounds__(kThreads) rope_kernel(const Args args) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= args.items) return;
  const uint32_t per_head = args.half / W;
  const int64_t head_row = item / per_head;
  const uint32_t i = static_cast<uint32_t>(item - head_row * per_head) * W;
  const int64_t n = head_row / args.heads;
  const int64_t h = head_row - n * args.heads;
  const float* row = args.table + static_cast<int64_t>(args.positions[n]) * 2 * args.half;
  const auto cosine = Pack<float, W>::load(row + i);
  const auto sine = Pack<float, W>::load(row + args.half + i);
  T* x = static_cast<T*>(args.x) + n * args.stride_n + h * args.stride_h + i;
  auto a = Pack<T, W>::load(x);
  auto b = Pack<T, W>::load(x + args.half);
#pragma unroll
  for (int k = 0; k < W; ++k) {
    const float c = cosine.x[k];
    const float s = sine.x[k] * args.sign;
    const float left = a.x[k];
    const float right = b.x[k];
    a.x[k] = left * c - right * s;
    b.x[k] = right * c + left * s;
  }
  a.store(x);
  b.store(x + args.half);
}

template <typename T, int W>
void launch(const Stream& stream, Args args) {
  args.items /= W;
  const auto blocks = static_cast<unsigned>(ceil_div(args.items, kThreads));
  rope_kernel<T, W><<<blocks, kThreads, 0, handle_of(stream)>>>(args);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void rope_apply(const Stream& stream, TensorView x, ConstTensorView table,
                ConstTensorView positions, bool inverse) {
  const int64_t half = x.size(2) / 2;
  const Args args{
      .x = x.raw(),
      .table = table.data<float>(),
      .positions = positions.data<int32_t>(),
      .stride_n = x.stride(0),
      .stride_h = x.stride(1),
      .items = x.size(0) * x.size(1) * half,
      .heads = static_cast<uint32_t>(x.size(1)),
      .half = static_cast<uint32_t>(half),
      .sign = inverse ? -1.0f : 1.0f,
  };
  if (args.items == 0) return;
  with_activation(x.dtype(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kWidth = 16 / sizeof(T);
    if (half % kWidth == 0 && rows_aligned(x) && rows_aligned(table)) {
      launch<T, kWidth>(stream, args);
    } else {
      launch<T, 1>(stream, args);
    }
  });
}

}  // namespace muster::cuda
