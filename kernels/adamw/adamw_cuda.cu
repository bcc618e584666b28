// Memory-bound: 16 bytes read and 12 written for every element of the shard, in one launch.
#include "kernels/adamw/factors.h"
#include "kernels/cuda/vec.cuh"

namespace muster::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = kThreads * 4;  // elements of a block: one 16-byte access a thread and array
constexpr int kMaxSegments = 512;    // of one launch; neighbours of equal decay count once

// Travels as a kernel parameter, so that no copy to the device has to be ordered or kept alive.
struct Plan {
  int count = 0;
  int64_t first = 0;  // tiles begin here, a multiple of 4
  int64_t begin[kMaxSegments];
  int64_t end[kMaxSegments];
  float decay[kMaxSegments];  // lr · weight_decay
};

// The same operations in the same order as the CPU's; each fma is explicit.
__device__ void update(float& weight, float& m, float& v, float grad, float decay,
                       const AdamwFactors& f) {
  const float g = __fmul_rn(grad, f.grad_scale);
  m = __fmaf_rn(f.beta1, m, __fmul_rn(f.one_minus_beta1, g));
  v = __fmaf_rn(f.beta2, v, __fmul_rn(__fmul_rn(f.one_minus_beta2, g), g));
  const float root = __fmaf_rn(__fsqrt_rn(v), f.inverse_root_correction, f.eps);
  weight = __fsub_rn(weight, __fmaf_rn(decay, weight, __fdiv_rn(__fmul_rn(f.step_size, m), root)));
}

__global__ void __launch_bounds__(kThreads)
    adamw_kernel(float* weight, float* m, float* v, const float* grad,
                 const __grid_constant__ Plan plan, const AdamwFactors f, bool vector) {
  const int64_t at = plan.first + static_cast<int64_t>(blockIdx.x) * kTile + threadIdx.x * 4;
  // The first segment that ends after `at`.
  int low = 0;
  int high = plan.count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (plan.end[middle] <= at) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == plan.count || plan.begin[low] >= at + 4) return;
  if (vector && plan.begin[low] <= at && at + 4 <= plan.end[low]) {
    float4 w4 = *reinterpret_cast<float4*>(weight + at);
    float4 m4 = *reinterpret_cast<float4*>(m + at);
    float4 v4 = *reinterpret_cast<float4*>(v + at);
    const float4 g4 = *reinterpret_cast<const float4*>(grad + at);
    const float decay = plan.decay[low];
    update(w4.x, m4.x, v4.x, g4.x, decay, f);
    update(w4.y, m4.y, v4.y, g4.y, decay, f);
    update(w4.z, m4.z, v4.z, g4.z, decay, f);
    update(w4.w, m4.w, v4.w, g4.w, decay, f);
    *reinterpret_cast<float4*>(weight + at) = w4;
    *reinterpret_cast<float4*>(m + at) = m4;
    *reinterpret_cast<float4*>(v + at) = v4;
    return;
  }
  for (int64_t i = at; i < at + 4; ++i) {
    while (low < plan.count && plan.end[low] <= i) ++low;
    if (low == plan.count) return;
    if (plan.begin[low] <= i) update(weight[i], m[i], v[i], grad[i], plan.decay[low], f);
  }
}

}  // namespace

void adamw_step(const Stream& stream, TensorView weight, TensorView m, TensorView v,
                ConstTensorView grad, std::span<const AdamwSegment> segments,
                const AdamwOptions& options) {
  const AdamwFactors factors = adamw_factors(options);
  const bool vector =
      rows_aligned(weight) && rows_aligned(m) && rows_aligned(v) && rows_aligned(grad);
  Plan plan;
  const auto launch = [&] {
    if (plan.count == 0) return;
    plan.first = plan.begin[0] / 4 * 4;
    const int64_t tiles = ceil_div(plan.end[plan.count - 1] - plan.first, kTile);
    adamw_kernel<<<static_cast<unsigned>(tiles), kThreads, 0, handle_of(stream)>>>(
        weight.data<float>(), m.data<float>(), v.data<float>(), grad.data<float>(), plan, factors,
        vector);
    CUDA_CHECK(cudaGetLastError());
    plan.count = 0;
  };
  for (const AdamwSegment& segment : segments) {
    if (segment.begin == segment.end) continue;
    const float decay = static_cast<float>(options.lr * segment.weight_decay);
    const int last = plan.count - 1;
    if (last >= 0 && plan.end[last] == segment.begin && plan.decay[last] == decay) {
      plan.end[last] = segment.end;
      continue;
    }
    if (plan.count == kMaxSegments) launch();
    plan.begin[plan.count] = segment.begin;
    plan.end[plan.count] = segment.end;
    plan.decay[plan.count] = decay;
    ++plan.count;
  }
  launch();
}

}  // namespace muster::cuda
