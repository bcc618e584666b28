// Memory-bound, one launch for the whole shard. Bytes an element: 16 read and 12 written, 2 more
// for `low`; with bfloat16 moments 12 and 8.
#include "common/rng.h"
#include "kernels/adamw/constants.h"
#include "kernels/cuda/vec.cuh"
#include "kernels/step_control/step_control.h"

namespace muster::cuda {
namespace {

constexpr int kThreads = 256;
// Elements of a thread: one 16-byte access of the moments.
template <typename M>
constexpr int kPerThread = 16 / sizeof(M);
constexpr int kMaxSegments = 1024;  // of one launch, after merging; a kernel takes 32 KiB of these

// Travels as a kernel parameter, so that no copy to the device has to be ordered or kept alive.
struct Plan {
  int count = 0;
  int64_t first = 0;  // tiles begin here, a multiple of any kPerThread
  int64_t begin[kMaxSegments];
  int64_t end[kMaxSegments];
  int64_t first_index[kMaxSegments];
  float decay[kMaxSegments];  // lr · weight_decay
};

template <typename M>
struct Arrays {
  float* weight;
  M* m;
  M* v;
  bf16* low;  // or null
  const float* grad;
};

// The same operations in the same order as the CPU's; each fma is explicit.
__device__ void update(float& weight, float& m, float& v, float grad, float decay,
                       const StepControl& s, const AdamwConstants& c) {
  const float g = __fmul_rn(grad, s.grad_scale);
  m = __fmaf_rn(c.beta1, m, __fmul_rn(c.one_minus_beta1, g));
  v = __fmaf_rn(c.beta2, v, __fmul_rn(__fmul_rn(c.one_minus_beta2, g), g));
  const float root = __fmaf_rn(__fsqrt_rn(v), s.inverse_root_correction, c.eps);
  weight = __fsub_rn(weight, __fmaf_rn(decay, weight, __fdiv_rn(__fmul_rn(s.step_size, m), root)));
}

// Rounds up with the probability that makes the mean of many roundings x: 16 random bits are added
// to the 16 that bfloat16 drops.
__device__ float round_stochastically(float x, uint32_t random) {
  if (isnan(x)) return x;
  return __uint_as_float((__float_as_uint(x) + (random & 0xffffu)) & 0xffff0000u);
}

// 32 random bits an element, four elements a Philox block.
__device__ uint32_t rounding_bits(const CounterRng& rng, int64_t index) {
  const PhiloxBlock block = rng.block(static_cast<uint64_t>(index) / 4);
  const uint32_t low = index % 2 == 0 ? block.word[0] : block.word[1];
  const uint32_t high = index % 2 == 0 ? block.word[2] : block.word[3];
  return index % 4 < 2 ? low : high;
}

template <typename M>
__device__ void round_moments(float& m, float& v, uint32_t random) {
  if constexpr (!std::is_same_v<M, float>) {
    m = round_stochastically(m, random);
    v = round_stochastically(v, random >> 16);
  }
}

// Random bits of N elements that begin at any index.
template <int N>
__device__ void fill_rounding_bits(uint32_t (&random)[N], const CounterRng& rng, int64_t index) {
  uint32_t words[N + 4] = {};
  const auto first = static_cast<uint64_t>(index) / 4;
  const auto skip = static_cast<uint32_t>(index) % 4;
  // The last block is needed by segments that are not aligned to blocks alone.
#pragma unroll
  for (int block = 0; block < N / 4 + 1; ++block) {
    if (block < N / 4 || skip != 0) {
      const PhiloxBlock bits = rng.block(first + block);
#pragma unroll
      for (int k = 0; k < 4; ++k) words[block * 4 + k] = bits.word[k];
    }
  }
  // Shifted by `skip` without a run-time index, which would put the words into memory.
#pragma unroll
  for (int k = 0; k < N + 3; ++k) words[k] = (skip & 1) != 0 ? words[k + 1] : words[k];
#pragma unroll
  for (int k = 0; k < N; ++k) random[k] = (skip & 2) != 0 ? words[k + 2] : words[k];
}

__device__ void store_low(bf16* to, const Pack<float, 8>& weight) {
  Pack<bf16, 8> low;
#pragma unroll
  for (int k = 0; k < 8; ++k) low.x[k] = weight.x[k];
  low.store(to);
}
__device__ void store_low(bf16* to, const Pack<float, 4>& weight) {
  const __nv_bfloat162 halves[2] = {__floats2bfloat162_rn(weight.x[0], weight.x[1]),
                                    __floats2bfloat162_rn(weight.x[2], weight.x[3])};
  *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(halves);
}

template <typename M>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(const Arrays<M> a, const StepControl* control, const __grid_constant__ Plan plan,
                 const AdamwConstants constants, const CounterRng seeded, bool vector) {
  constexpr int N = kPerThread<M>;
  const int64_t at = plan.first + (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * N;
  // The first segment that ends after `at`.
  int segment = 0;
  int high = plan.count;
  while (segment < high) {
    const int middle = (segment + high) / 2;
    if (plan.end[middle] <= at) {
      segment = middle + 1;
    } else {
      high = middle;
    }
  }
  if (segment == plan.count || plan.begin[segment] >= at + N) return;
  if (vector && plan.begin[segment] <= at && at + N <= plan.end[segment]) {
    auto weight = Pack<float, N>::load(a.weight + at);
    auto m = Pack<M, N>::load(a.m + at);
    auto v = Pack<M, N>::load(a.v + at);
    const auto grad = Pack<float, N>::load(a.grad + at);
    const StepControl state = *control;  // behind the loads above, which need not wait for it
    if (state.apply == 0) return;
    const float decay = plan.decay[segment];
    uint32_t random[N] = {};
    if constexpr (!std::is_same_v<M, float>) {
      fill_rounding_bits(random, seeded.with_stream(static_cast<uint64_t>(state.updates)),
                         plan.first_index[segment] + at - plan.begin[segment]);
    }
#pragma unroll
    for (int k = 0; k < N; ++k) {
      update(weight.x[k], m.x[k], v.x[k], grad.x[k], decay, state, constants);
      round_moments<M>(m.x[k], v.x[k], random[k]);
    }
    weight.store(a.weight + at);
    m.store(a.m + at);
    v.store(a.v + at);
    if (a.low != nullptr) store_low(a.low + at, weight);
    return;
  }
  const StepControl state = *control;
  if (state.apply == 0) return;
  const CounterRng rng = seeded.with_stream(static_cast<uint64_t>(state.updates));
  for (int64_t i = at; i < at + N; ++i) {
    while (segment < plan.count && plan.end[segment] <= i) ++segment;
    if (segment == plan.count) return;
    if (plan.begin[segment] > i) continue;
    float m = to_float(a.m[i]);
    float v = to_float(a.v[i]);
    update(a.weight[i], m, v, a.grad[i], plan.decay[segment], state, constants);
    if constexpr (!std::is_same_v<M, float>) {
      const int64_t index = plan.first_index[segment] + i - plan.begin[segment];
      round_moments<M>(m, v, rounding_bits(rng, index));
    }
    a.m[i] = from_float<M>(m);
    a.v[i] = from_float<M>(v);
    if (a.low != nullptr) a.low[i] = from_float<bf16>(a.weight[i]);
  }
}

// A segment that goes on where the last one ended, in its decay and, where that matters, in its
// indices.
bool continues(const Plan& plan, const AdamwSegment& segment, float decay, bool indexed) {
  const int last = plan.count - 1;
  if (last < 0 || plan.end[last] != segment.begin || plan.decay[last] != decay) return false;
  return !indexed ||
         plan.first_index[last] + segment.begin - plan.begin[last] == segment.first_index;
}

}  // namespace

void adamw_step(const Stream& stream, TensorView weight, TensorView m, TensorView v, TensorView low,
                ConstTensorView grad, ConstTensorView control,
                std::span<const AdamwSegment> segments, const AdamwOptions& options) {
  const AdamwConstants constants(options);
  const CounterRng rng(options.rounding_seed, RandomPurpose::kRounding, 0);
  const bool vector = rows_aligned(weight) && rows_aligned(m) && rows_aligned(v) &&
                      rows_aligned(grad) && (!low.defined() || rows_aligned(low));
  const bool indexed = m.dtype() == DType::kBFloat16;
  Plan plan;
  const auto launch = [&] {
    if (plan.count == 0) return;
    plan.first = plan.begin[0] / kPerThread<bf16> * kPerThread<bf16>;
    with_activation(m.dtype(), [&](auto* type) {
      using M = std::remove_pointer_t<decltype(type)>;
      const int64_t tiles =
          ceil_div(plan.end[plan.count - 1] - plan.first, kThreads * kPerThread<M>);
      const Arrays<M> arrays{.weight = weight.data<float>(),
                             .m = static_cast<M*>(m.raw()),
                             .v = static_cast<M*>(v.raw()),
                             .low = static_cast<bf16*>(low.raw()),
                             .grad = grad.data<float>()};
      adamw_kernel<M><<<static_cast<unsigned>(tiles), kThreads, 0, handle_of(stream)>>>(
          arrays, static_cast<const StepControl*>(control.raw()), plan, constants, rng, vector);
    });
    CUDA_CHECK(cudaGetLastError());
    plan.count = 0;
  };
  for (const AdamwSegment& segment : segments) {
    if (segment.begin == segment.end) continue;
    const float decay = static_cast<float>(options.lr * segment.weight_decay);
    if (continues(plan, segment, decay, indexed)) {
      plan.end[plan.count - 1] = segment.end;
      continue;
    }
    if (plan.count == kMaxSegments) launch();
    plan.begin[plan.count] = segment.begin;
    plan.end[plan.count] = segment.end;
    plan.first_index[plan.count] = segment.first_index;
    plan.decay[plan.count] = decay;
    ++plan.count;
  }
  launch();
}

}  // namespace muster::cuda
