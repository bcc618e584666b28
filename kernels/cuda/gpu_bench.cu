#include <array>
#include <cmath>
#include <cstdio>

#include "common/rng.h"
#include "kernels/adamw/adamw.h"
#include "kernels/attention/attention.h"
#include "kernels/cuda/gpu_bench_runner.cuh"
#include "kernels/elementwise/elementwise.h"
#include "kernels/embedding/embedding.h"
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
  bench_all_products(bench);
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
