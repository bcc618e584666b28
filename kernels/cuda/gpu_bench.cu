#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "common/rng.h"
#include "kernels/adamw/adamw.h"
#include "kernels/attention/attention.h"
#include "kernels/cross_entropy/cross_entropy.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/gpu_bench.h"
#include "kernels/cuda/vec.cuh"
#include "kernels/elementwise/elementwise.h"
#include "kernels/embedding/embedding.h"
#include "kernels/fp8/fp8.h"
#include "kernels/gelu/gelu.h"
#include "kernels/global_norm/global_norm.h"
#include "kernels/layernorm/layernorm.h"
#include "kernels/matmul/matmul.h"
#include "kernels/rmsnorm/rmsnorm.h"
#include "kernels/rope/rope.h"
#include "kernels/step_control/step_control.h"
#include "kernels/swiglu/swiglu.h"

namespace muster::cuda {
namespace {

constexpr int64_t kFlushBytes = int64_t{512} << 20;  // several times the L2 cache of any GPU
constexpr DType kBf16 = DType::kBFloat16;
constexpr DType kFp32 = DType::kFloat32;

// Numbers in (−1, 1) that depend on their index only; zeros would run faster than real data.
template <typename T>
__global__ void fill_kernel(T* out, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (i >= n) return;
  uint32_t x = static_cast<uint32_t>(i) * 2654435761u;
  x ^= x >> 15;
  x *= 2246822519u;
  x ^= x >> 13;
  out[i] = from_float<T>(static_cast<float>(x) * 0x1p-31f - 1.0f);
}

// Reads more than the L2 cache holds. Writing would leave it full of lines that the timed kernel
// has to write back.
__global__ void flush_kernel(const uint4* data, int64_t n, uint32_t* out) {
  uint32_t sum = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; i < n;
       i += static_cast<int64_t>(gridDim.x) * 256) {
    sum += data[i].x;
  }
  if (sum == 0x12345678u) *out = sum;  // never; keeps the loads
}

class Bench {
 public:
  Bench(const GpuBenchOptions& options, const std::function<void(const GpuBenchRow&)>& on_row)
      : options_(options), on_row_(on_row), memory_(0) {
    CUDA_CHECK(cudaSetDevice(0));
    cudaStream_t handle = nullptr;
    CUDA_CHECK(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking));
    stream_ = {Device::cuda(0), handle};
    CUDA_CHECK(cudaEventCreate(&begin_));
    CUDA_CHECK(cudaEventCreate(&end_));
    flush_ = zeros({kFlushBytes}, DType::kUInt8);
    cudaDeviceProp properties{};
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    report_.gpu = properties.name;
  }
  ~Bench() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    cudaStreamDestroy(handle_of(stream_));
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  const Stream& stream() const { return stream_; }
  Allocator& memory() { return memory_; }
  GpuBenchReport& report() { return report_; }

  Tensor numbers(Shape shape, DType dtype) {
    Tensor tensor(shape, dtype, memory_);
    const auto blocks = static_cast<unsigned>(ceil_div(tensor.numel(), 256));
    with_activation(dtype, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      fill_kernel<<<blocks, 256, 0, handle_of(stream_)>>>(static_cast<T*>(tensor.view().raw()),
                                                          tensor.numel());
    });
    CUDA_CHECK(cudaGetLastError());
    return tensor;
  }
  Tensor zeros(Shape shape, DType dtype) {
    Tensor tensor(shape, dtype, memory_);
    fill_zero(stream_, tensor);
    return tensor;
  }
  Tensor ints(const std::vector<int32_t>& values) {
    Tensor tensor({static_cast<int64_t>(values.size())}, DType::kInt32, memory_);
    CUDA_CHECK(cudaMemcpyAsync(tensor.view().raw(), values.data(), tensor.bytes(),
                               cudaMemcpyHostToDevice, handle_of(stream_)));
    CUDA_CHECK(cudaStreamSynchronize(handle_of(stream_)));
    return tensor;
  }

  bool wanted(const std::string& kernel) const {
    return kernel.find(options_.filter) != std::string::npos;
  }

  double median_ms(const std::function<void()>& call) {
    std::vector<float> times;
    for (int i = -2; i < options_.runs; ++i) {
      auto* data = static_cast<uint4*>(flush_.view().raw());
      flush_kernel<<<1024, 256, 0, handle_of(stream_)>>>(data, kFlushBytes / 16,
                                                         reinterpret_cast<uint32_t*>(data));
      CUDA_CHECK(cudaGetLastError());
      CUDA_CHECK(cudaEventRecord(begin_, handle_of(stream_)));
      call();
      CUDA_CHECK(cudaEventRecord(end_, handle_of(stream_)));
      CUDA_CHECK(cudaEventSynchronize(end_));
      float ms = 0.0f;
      CUDA_CHECK(cudaEventElapsedTime(&ms, begin_, end_));
      if (i >= 0) times.push_back(ms);
    }
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
  }
  void memory_row(const std::string& kernel, const std::string& shape, double bytes,
                  const std::function<void()>& call) {
    add_row(kernel, shape, bytes * 1e-6, true, report_.copy_gb_per_s, call);
  }
  void product_row(const std::string& kernel, const std::string& shape, double operations,
                   const std::function<void()>& call) {
    add_row(kernel, shape, operations * 1e-9, false, report_.matmul_tflop_per_s, call);
  }

 private:
  void add_row(const std::string& kernel, const std::string& shape, double work_per_ms,
               bool memory_bound, double ceiling, const std::function<void()>& call) {
    GpuBenchRow row{.kernel = kernel, .shape = shape, .memory_bound = memory_bound};
    row.median_ms = median_ms(call);
    row.rate = work_per_ms / row.median_ms;
    row.percent = 100.0 * row.rate / ceiling;
    if (on_row_) on_row_(row);
    report_.rows.push_back(row);
  }

  GpuBenchOptions options_;
  std::function<void(const GpuBenchRow&)> on_row_;
  DeviceAllocator memory_;
  Stream stream_;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
  Tensor flush_;
  GpuBenchReport report_;
};

void measure_ceilings(Bench& bench) {
  const Stream& s = bench.stream();
  {
    const Tensor from = bench.numbers({int64_t{1} << 30}, kFp32);
    const Tensor to = bench.zeros({int64_t{1} << 30}, kFp32);
    bench.report().copy_gb_per_s =
        2e-6 * from.bytes() / bench.median_ms([&] { copy_cast(s, to, from); });
  }
  const Tensor a = bench.numbers({8192, 8192}, kBf16);
  const Tensor b = bench.numbers({8192, 8192}, kBf16);
  const Tensor out = bench.zeros({8192, 8192}, kBf16);
  bench.report().matmul_tflop_per_s =
      2e-9 * 8192.0 * 8192.0 * 8192.0 / bench.median_ms([&] { matmul(s, out, a, b); });
}

std::string shape_of(std::initializer_list<int64_t> sizes) {
  return Shape(sizes).to_string();
}

void bench_norms(Bench& bench) {
  const Stream& s = bench.stream();
  for (const auto& [n, d] :
       {std::pair<int64_t, int64_t>{16384, 2048}, {16384, 4096}, {65536, 768}}) {
    const Tensor x = bench.numbers({n, d}, kBf16);
    const Tensor grad = bench.numbers({n, d}, kBf16);
    const Tensor out = bench.zeros({n, d}, kBf16);
    const Tensor weight = bench.numbers({d}, kBf16);
    const Tensor bias = bench.numbers({d}, kBf16);
    const Tensor mean = bench.zeros({n}, kFp32);
    const Tensor rstd = bench.zeros({n}, kFp32);
    const Tensor grad_weight = bench.zeros({d}, kFp32);
    const Tensor grad_bias = bench.zeros({d}, kFp32);
    const double bytes = 2.0 * n * d;
    const std::string shape = shape_of({n, d});
    if (bench.wanted("rmsnorm")) {
      bench.memory_row("rmsnorm_forward", shape, 2 * bytes,
                       [&] { rmsnorm_forward(s, out, rstd, x, weight, 1e-5f); });
      bench.memory_row("rmsnorm_backward", shape, 3 * bytes,
                       [&] { rmsnorm_backward(s, out, grad_weight, grad, x, weight, rstd); });
      bench.memory_row("rmsnorm_backward, accumulating", shape, 4 * bytes,
                       [&] { rmsnorm_backward(s, out, grad_weight, grad, x, weight, rstd, true); });
    }
    if (bench.wanted("layernorm") && d == 768) {
      bench.memory_row("layernorm_forward", shape, 2 * bytes,
                       [&] { layernorm_forward(s, out, mean, rstd, x, weight, bias, 1e-5f); });
      bench.memory_row("layernorm_backward", shape, 3 * bytes, [&] {
        layernorm_backward(s, out, grad_weight, grad_bias, grad, x, weight, mean, rstd);
      });
      bench.memory_row("layernorm_backward, accumulating", shape, 4 * bytes, [&] {
        layernorm_backward(s, out, grad_weight, grad_bias, grad, x, weight, mean, rstd, true);
      });
    }
  }
}

void bench_activations(Bench& bench) {
  const Stream& s = bench.stream();
  if (bench.wanted("swiglu")) {
    const int64_t n = 16384;
    const int64_t f = 8192;
    const Tensor gate_up = bench.numbers({n, 2 * f}, kBf16);
    const Tensor out = bench.numbers({n, f}, kBf16);
    const Tensor grad = bench.zeros({n, 2 * f}, kBf16);
    bench.memory_row("swiglu_forward", shape_of({n, f}), 3 * 2.0 * n * f,
                     [&] { swiglu_forward(s, out, gate_up); });
    bench.memory_row("swiglu_backward", shape_of({n, f}), 5 * 2.0 * n * f,
                     [&] { swiglu_backward(s, grad, out, gate_up); });
    const Tensor amax = bench.zeros({1}, kFp32);
    bench.memory_row("swiglu_backward with amax", shape_of({n, f}), 5 * 2.0 * n * f,
                     [&] { swiglu_backward(s, grad, out, gate_up, amax); });
    fill_zero(s, amax);
    bench.memory_row("swiglu_forward with amax", shape_of({n, f}), 3 * 2.0 * n * f,
                     [&] { swiglu_forward(s, out, gate_up, amax); });
  }
  if (bench.wanted("gelu")) {
    const Shape shape{65536, 3072};
    const Tensor x = bench.numbers(shape, kBf16);
    const Tensor out = bench.numbers(shape, kBf16);
    const Tensor grad = bench.zeros(shape, kBf16);
    bench.memory_row("gelu_forward", shape.to_string(), 2 * 2.0 * shape.numel(),
                     [&] { gelu_forward(s, out, x); });
    bench.memory_row("gelu_backward", shape.to_string(), 3 * 2.0 * shape.numel(),
                     [&] { gelu_backward(s, grad, out, x); });
  }
  if (bench.wanted("rope")) {
    const int64_t n = 16384;
    const int64_t heads = 40;
    const int64_t d = 64;
    const Tensor qkv = bench.numbers({n, 48, d}, kBf16);
    Tensor host_table({4096, 2, d / 2}, kFp32);
    rope_table(host_table, {.theta = 500000.0});
    const Tensor table = bench.zeros({4096, 2, d / 2}, kFp32);
    CUDA_CHECK(cudaMemcpyAsync(table.view().raw(), host_table.view().raw(), table.bytes(),
                               cudaMemcpyHostToDevice, handle_of(s)));
    std::vector<int32_t> ids(n);
    for (int64_t i = 0; i < n; ++i) ids[i] = static_cast<int32_t>(i % 4096);
    const Tensor positions = bench.ints(ids);
    bench.memory_row("rope_apply", shape_of({n, heads, d}), 2 * 2.0 * n * heads * d, [&] {
      rope_apply(s, qkv.view().narrow(1, 0, heads), table, positions, false);
    });
  }
}

void bench_embedding(Bench& bench) {
  if (!bench.wanted("embedding")) return;
  const Stream& s = bench.stream();
  for (const auto& [n, v, d] :
       {std::array<int64_t, 3>{16384, 128256, 2048}, {65536, 50304, 768}, {65536, 256, 768}}) {
    const Tensor weight = bench.numbers({v, d}, kBf16);
    const Tensor out = bench.numbers({n, d}, kBf16);
    const Tensor grad_weight = bench.zeros({v, d}, kFp32);
    // Zipf-like, as words are: a few ids make up much of the text.
    const CounterRng rng(1, RandomPurpose::kInit, 0);
    std::vector<int32_t> ids(n);
    std::vector<bool> seen(v, false);
    int64_t distinct = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double u = rng.uniform(i);
      ids[i] = static_cast<int32_t>(std::pow(static_cast<double>(v), u)) % v;
      distinct += !seen[ids[i]];
      seen[ids[i]] = true;
    }
    const Tensor tokens = bench.ints(ids);
    bench.memory_row("embedding_forward", shape_of({n, v, d}), 2.0 * d * (n + distinct),
                     [&] { embedding_forward(s, out, weight, tokens); });
    const double backward_bytes = 2.0 * n * d + 8.0 * distinct * d;
    bench.memory_row("embedding_backward", shape_of({n, v, d}), backward_bytes,
                     [&] { embedding_backward(s, grad_weight, out, tokens); });
    const Tensor order = bench.zeros({n, 2}, DType::kInt32);
    embedding_order(s, order, tokens, v);
    bench.memory_row("embedding_backward, order made before", shape_of({n, v, d}), backward_bytes,
                     [&] { embedding_backward(s, grad_weight, out, tokens, order); });
  }
}

void bench_shard(Bench& bench) {
  const Stream& s = bench.stream();
  const int64_t n = int64_t{256} << 20;
  if (!bench.wanted("adamw") && !bench.wanted("sum_of_squares") && !bench.wanted("copy_cast") &&
      !bench.wanted("add")) {
    return;
  }
  const Tensor weight = bench.numbers({n}, kFp32);
  const Tensor m = bench.zeros({n}, kFp32);
  const Tensor v = bench.zeros({n}, kFp32);
  const Tensor grad = bench.numbers({n}, kFp32);
  const Tensor narrow = bench.zeros({n}, kBf16);
  const Tensor sum = bench.zeros({1}, DType::kFloat64);
  std::vector<AdamwSegment> segments;
  for (int64_t i = 0; i < 200; ++i) {
    segments.push_back({n * i / 200, n * (i + 1) / 200, i % 2 == 0 ? 0.1f : 0.0f, n * i / 200});
  }
  const std::string shape = shape_of({n});
  const StepControl control{.updates = 10,
                            .apply = 1,
                            .grad_scale = 1.0f,
                            .step_size = 1e-4f,
                            .inverse_root_correction = 1.0f};
  const Tensor state = bench.zeros({sizeof(StepControl)}, DType::kUInt8);
  CUDA_CHECK(cudaMemcpyAsync(state.view().raw(), &control, sizeof(control), cudaMemcpyHostToDevice,
                             handle_of(s)));
  bench.memory_row("adamw_step", shape, 28.0 * n,
                   [&] { adamw_step(s, weight, m, v, {}, grad, state, segments, {}); });
  bench.memory_row("adamw_step, bfloat16 copy", shape, 30.0 * n,
                   [&] { adamw_step(s, weight, m, v, narrow, grad, state, segments, {}); });
  const TensorView left(m.view().raw(), kBf16, {n}, s.device);
  const TensorView right(v.view().raw(), kBf16, {n}, s.device);
  fill_zero(s, left);
  fill_zero(s, right);
  bench.memory_row("adamw_step, bfloat16 moments too", shape, 22.0 * n,
                   [&] { adamw_step(s, weight, left, right, narrow, grad, state, segments, {}); });
  bench.memory_row("sum_of_squares", shape, 4.0 * n, [&] { sum_of_squares(s, sum, grad); });
  bench.memory_row("copy_cast float32 to bfloat16", shape, 6.0 * n,
                   [&] { copy_cast(s, narrow, weight); });
  bench.memory_row("add bfloat16", shape, 6.0 * n, [&] { add(s, narrow, left, right); });
}

void bench_products(Bench& bench) {
  if (!bench.wanted("matmul") && !bench.wanted("linear")) return;
  const Stream& s = bench.stream();
  for (const auto& [m, n, k] : {std::array<int64_t, 3>{16384, 3072, 2048},
                                {16384, 2048, 2048},
                                {16384, 16384, 2048},
                                {16384, 2048, 8192},
                                {16384, 14336, 4096},
                                {65536, 3072, 768},
                                {65536, 768, 3072}}) {
    const Tensor x = bench.numbers({m, k}, kBf16);
    const Tensor weight = bench.numbers({n, k}, kBf16);
    const Tensor bias = bench.numbers({n}, kBf16);
    const Tensor out = bench.numbers({m, n}, kBf16);
    const Tensor grad_x = bench.zeros({m, k}, kBf16);
    const Tensor grad_weight = bench.zeros({n, k}, kFp32);
    const double operations = 2.0 * m * n * k;
    const std::string shape = shape_of({m, n, k});
    bench.product_row("linear_forward", shape, operations,
                      [&] { linear_forward(s, out, x, weight); });
    bench.product_row("linear_forward with bias", shape, operations,
                      [&] { linear_forward(s, out, x, weight, bias); });
    bench.product_row("linear_forward with residual", shape, operations,
                      [&] { linear_forward(s, out, x, weight, {}, out); });
    bench.product_row("linear_backward", shape, 2 * operations,
                      [&] { linear_backward(s, grad_x, grad_weight, {}, out, x, weight); });
    bench.product_row("linear_backward, weight overwritten", shape, 2 * operations,
                      [&] { linear_backward(s, grad_x, grad_weight, {}, out, x, weight, false); });
  }
}

// GPT-2's feed-forward layer, up to the GELU and back through it.
void bench_linear_gelu(Bench& bench) {
  if (!bench.wanted("linear_gelu")) return;
  const Stream& s = bench.stream();
  const int64_t m = 65536;
  const int64_t d = 768;
  const int64_t f = 4 * d;
  const Tensor x = bench.numbers({m, d}, kBf16);
  const Tensor weight = bench.numbers({f, d}, kBf16);
  const Tensor next_weight = bench.numbers({d, f}, kBf16);
  const Tensor bias = bench.numbers({f}, kBf16);
  const Tensor hidden = bench.numbers({m, f}, kBf16);
  const Tensor out = bench.zeros({m, f}, kBf16);
  const Tensor grad_bias = bench.zeros({f}, kFp32);
  const double operations = 2.0 * m * d * f;
  const std::string shape = shape_of({m, f, d});
  bench.product_row("linear_forward, then gelu_forward", shape, operations, [&] {
    linear_forward(s, hidden, x, weight, bias);
    gelu_forward(s, out, hidden);
  });
  bench.product_row("linear_gelu_forward", shape, operations,
                    [&] { linear_gelu_forward(s, out, hidden, x, weight, bias); });
  bench.product_row("linear_backward, then gelu_backward", shape, operations, [&] {
    linear_backward(s, out, {}, {}, x, {}, next_weight);
    gelu_backward(s, out, out, hidden);
    linear_backward(s, {}, {}, grad_bias, out, {}, {});
  });
  bench.product_row("linear_gelu_backward", shape, operations,
                    [&] { linear_gelu_backward(s, out, grad_bias, x, next_weight, hidden); });
  bench.product_row("linear_gelu_backward in place", shape, operations,
                    [&] { linear_gelu_backward(s, hidden, grad_bias, x, next_weight, hidden); });
}

// A layer in float8 with all of its roundings: the weight's, which lasts a step, and those of its
// input and gradient.
void bench_fp8(Bench& bench) {
  if (!bench.wanted("fp8") || !fp8_supported(Device::cuda(0))) return;
  const Stream& s = bench.stream();
  Allocator& memory = bench.memory();
  constexpr DType kActivation = DType::kFloat8E4M3;
  constexpr DType kGradient = DType::kFloat8E5M2;
  for (const auto& [m, n, k] : {std::array<int64_t, 3>{16384, 3072, 2048},
                                {16384, 2048, 2048},
                                {16384, 16384, 2048},
                                {16384, 2048, 8192}}) {
    const Tensor x = bench.numbers({m, k}, kBf16);
    const Tensor weight = bench.numbers({n, k}, kBf16);
    const Tensor grad_out = bench.numbers({m, n}, kBf16);
    const Tensor out = bench.zeros({m, n}, kBf16);
    const Tensor grad_x = bench.zeros({m, k}, kBf16);
    const Tensor grad_weight = bench.zeros({n, k}, kFp32);
    const std::string shape = shape_of({m, n, k});
    bench.memory_row("fp8_quantise both copies", shape_of({m, k}), 4.0 * m * k,
                     [&] { fp8_quantise(s, memory, x, kActivation); });
    bench.memory_row("fp8_quantise both copies", shape_of({m, n}), 4.0 * m * n,
                     [&] { fp8_quantise(s, memory, grad_out, kGradient); });
    bench.memory_row("fp8_quantise both copies", shape_of({n, k}), 4.0 * n * k,
                     [&] { fp8_quantise(s, memory, weight, kActivation); });
    const Tensor amax = bench.numbers({1}, kFp32);
    bench.memory_row("fp8_quantise, amax known", shape_of({m, n}), 4.0 * m * n,
                     [&] { fp8_quantise(s, memory, grad_out, kGradient, Fp8Copies::kBoth, amax); });
    const Fp8Operand x8 = fp8_quantise(s, memory, x, kActivation);
    const Fp8Operand weight8 = fp8_quantise(s, memory, weight, kActivation);
    const Fp8Operand grad8 = fp8_quantise(s, memory, grad_out, kGradient);
    const double operations = 2.0 * m * n * k;
    for (const bool exact : {false, true}) {
      const std::string sums = exact ? ", exact sums" : "";
      bench.product_row("fp8_matmul forward" + sums, shape, operations, [&] {
        fp8_matmul(s, out, x8.by_columns(), weight8.by_columns(), {.exact_sums = exact});
      });
      bench.product_row("fp8_matmul grad_x" + sums, shape, operations, [&] {
        fp8_matmul(s, grad_x, grad8.by_columns(), weight8.by_rows(), {.exact_sums = exact});
      });
      bench.product_row("fp8_matmul grad_weight" + sums, shape, operations, [&] {
        fp8_matmul(s, grad_weight, grad8.by_rows(), x8.by_rows(), {.exact_sums = exact});
      });
      bench.product_row("fp8_matmul grad_weight +=" + sums, shape, operations, [&] {
        fp8_matmul(s, grad_weight, grad8.by_rows(), x8.by_rows(),
                   {.addend = grad_weight, .exact_sums = exact});
      });
    }
  }
}

void bench_cross_entropy(Bench& bench) {
  if (!bench.wanted("cross_entropy")) return;
  const Stream& s = bench.stream();
  for (const auto& [n, v, d] : {std::array<int64_t, 3>{16384, 128256, 2048}, {65536, 50304, 768}}) {
    const Tensor hidden = bench.numbers({n, d}, kBf16);
    const Tensor weight = bench.numbers({v, d}, kBf16);
    const Tensor grad_hidden = bench.zeros({n, d}, kBf16);
    const Tensor grad_weight = bench.zeros({v, d}, kFp32);
    const Tensor loss = bench.zeros({1}, DType::kFloat64);
    std::vector<int32_t> ids(n);
    for (int64_t i = 0; i < n; ++i) ids[i] = static_cast<int32_t>(i * 7919 % v);
    const Tensor targets = bench.ints(ids);
    bench.product_row("linear_cross_entropy_train", shape_of({n, v, d}), 6.0 * n * v * d, [&] {
      linear_cross_entropy_train(s, loss, grad_hidden, grad_weight, hidden, weight, targets);
    });
  }
}

// 16384 tokens in segments of `length`; the backward counts as 2.5 forwards.
void bench_attention(Bench& bench, int64_t heads_q, int64_t heads_k, int64_t width, int64_t length,
                     bool causal) {
  const Stream& s = bench.stream();
  const int64_t n = 16384;
  const Tensor q = bench.numbers({n, heads_q, width}, kBf16);
  const Tensor k = bench.numbers({n, heads_k, width}, kBf16);
  const Tensor v = bench.numbers({n, heads_k, width}, kBf16);
  const Tensor out = bench.zeros({n, heads_q, width}, kBf16);
  const Tensor grad_out = bench.numbers({n, heads_q, width}, kBf16);
  const Tensor grad_q = bench.zeros({n, heads_q, width}, kBf16);
  const Tensor grad_k = bench.zeros({n, heads_k, width}, kBf16);
  const Tensor grad_v = bench.zeros({n, heads_k, width}, kBf16);
  const Tensor lse = bench.zeros({heads_q, n}, kFp32);
  std::vector<int32_t> ends;
  for (int64_t at = 0; at <= n; at += length) ends.push_back(static_cast<int32_t>(at));
  const Tensor cu = bench.ints(ends);
  const Segments segments{.cu_seqlens_q = cu, .cu_seqlens_k = cu, .max_q = length, .max_k = length};
  AttentionOptions options{.causal = causal};
  const double operations = 4.0 * n * length * heads_q * width / (causal ? 2 : 1);
  const std::string shape = std::to_string(heads_q) + "/" + std::to_string(heads_k) + " heads of " +
                            std::to_string(width) + ", T " + std::to_string(length) +
                            (causal ? ", causal" : ", full");
  bench.product_row("attention_forward", shape, operations,
                    [&] { attention_forward(s, out, lse, q, k, v, segments, options); });
  for (const bool deterministic : {true, false}) {
    options.deterministic = deterministic;
    bench.product_row(deterministic ? "attention_backward" : "attention_backward, any order", shape,
                      2.5 * operations, [&] {
                        attention_backward(s, grad_q, grad_k, grad_v, grad_out, q, k, v, out, lse,
                                           segments, options);
                      });
  }
}

}  // namespace

GpuBenchReport bench_gpu(const GpuBenchOptions& options,
                         const std::function<void(const GpuBenchRow&)>& on_row) {
  Bench bench(options, on_row);
  measure_ceilings(bench);
  bench_norms(bench);
  bench_activations(bench);
  bench_embedding(bench);
  bench_shard(bench);
  bench_products(bench);
  bench_linear_gelu(bench);
  bench_fp8(bench);
  bench_cross_entropy(bench);
  if (bench.wanted("attention")) {
    bench_attention(bench, 12, 12, 64, 1024, true);
    bench_attention(bench, 32, 32, 64, 4096, true);
    bench_attention(bench, 32, 8, 64, 4096, true);
    bench_attention(bench, 32, 32, 64, 16384, false);
    bench_attention(bench, 16, 16, 128, 1024, true);
    bench_attention(bench, 16, 16, 128, 4096, true);
    bench_attention(bench, 32, 8, 128, 4096, true);
    bench_attention(bench, 32, 8, 128, 16384, true);
    bench_attention(bench, 16, 16, 128, 16384, false);
  }
  return bench.report();
}

std::string gpu_bench_line(const GpuBenchRow& row) {
  char line[256];
  std::snprintf(line, sizeof(line), "%-36s %-36s %9.3f ms %8.0f %-7s %5.1f %%", row.kernel.c_str(),
                row.shape.c_str(), row.median_ms, row.rate, row.memory_bound ? "GB/s" : "TFLOP/s",
                row.percent);
  return line;
}

}  // namespace muster::cuda
