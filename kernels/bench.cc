#include "kernels/bench.h"

#include <fmt/format.h>
#include <omp.h>

#include <fstream>

#include "common/rng.h"
#include "kernels/adamw/adamw.h"
#include "kernels/attention/attention.h"
#include "kernels/bench_timing.h"
#include "kernels/cross_entropy/cross_entropy.h"
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

namespace muster {
namespace {

// One kernel with its tensors, which the closure owns.
struct Case {
  std::string kernel;
  std::string shape;
  bool memory_bound;
  double work;  // bytes or floating-point operations of a run
  std::function<void()> run;
};
using Cases = std::vector<Case>;

constexpr double kFloatBytes = sizeof(float);

Tensor random_floats(Shape shape) {
  Tensor tensor(shape, DType::kFloat32);
  const CounterRng rng(1, RandomPurpose::kInit, static_cast<uint64_t>(shape.numel()));
  float* data = tensor.data<float>();
  const int64_t n = tensor.numel();
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < n; ++i) data[i] = static_cast<float>(rng.uniform(i) - 0.5);
  return tensor;
}

// Each of [0, values) about equally often, in no simple order.
Tensor spread_ids(int64_t n, int64_t values) {
  Tensor ids({n}, DType::kInt32);
  for (int64_t i = 0; i < n; ++i) ids.data<int32_t>()[i] = static_cast<int32_t>(i * 7919 % values);
  return ids;
}

Tensor arange(int64_t count, int64_t step) {
  Tensor values({count}, DType::kInt32);
  for (int64_t i = 0; i < count; ++i) values.data<int32_t>()[i] = static_cast<int32_t>(i * step);
  return values;
}

std::string shape_text(const Tensor& tensor) {
  return tensor.shape().to_string();
}

Cases embedding_cases(const KernelBenchOptions& o) {
  const Tensor weight = random_floats({o.vocab, o.dim});
  const Tensor rows = random_floats({o.tokens, o.dim});
  const Tensor ids = spread_ids(o.tokens, o.vocab);
  const double row_bytes = o.dim * kFloatBytes;
  const double touched = static_cast<double>(std::min(o.tokens, o.vocab));
  return {{"embedding_forward", shape_text(rows), true, (touched + o.tokens) * row_bytes,
           [=] { embedding_forward(Stream::cpu(), rows, weight, ids); }},
          {"embedding_backward", shape_text(rows), true, (o.tokens + 2 * touched) * row_bytes,
           [=] { embedding_backward(Stream::cpu(), weight, rows, ids); }}};
}

Cases norm_cases(const KernelBenchOptions& o) {
  const Tensor x = random_floats({o.tokens, o.dim});
  const Tensor out = random_floats({o.tokens, o.dim});
  const Tensor grad = random_floats({o.tokens, o.dim});
  const Tensor weight = random_floats({o.dim});
  const Tensor bias = random_floats({o.dim});
  const Tensor grad_weight = random_floats({o.dim});
  const Tensor grad_bias = random_floats({o.dim});
  const Tensor mean = random_floats({o.tokens});
  const Tensor rstd = random_floats({o.tokens});
  const double bytes = static_cast<double>(x.bytes());
  constexpr float kEps = 1e-5f;
  return {{"rmsnorm_forward", shape_text(x), true, 2 * bytes,
           [=] { rmsnorm_forward(Stream::cpu(), out, rstd, x, weight, kEps); }},
          {"rmsnorm_backward", shape_text(x), true, 3 * bytes,
           [=] { rmsnorm_backward(Stream::cpu(), out, grad_weight, grad, x, weight, rstd); }},
          {"layernorm_forward", shape_text(x), true, 2 * bytes,
           [=] { layernorm_forward(Stream::cpu(), out, mean, rstd, x, weight, bias, kEps); }},
          {"layernorm_backward", shape_text(x), true, 3 * bytes, [=] {
             layernorm_backward(Stream::cpu(), out, grad_weight, grad_bias, grad, x, weight, mean,
                                rstd);
           }}};
}

Cases rope_cases(const KernelBenchOptions& o) {
  const Tensor x = random_floats({o.tokens, o.heads + o.kv_heads, o.head_dim});
  const Tensor table({o.segment, 2, o.head_dim / 2}, DType::kFloat32);
  rope_table(table, {});
  const Tensor positions = spread_ids(o.tokens, o.segment);
  return {{"rope_apply", shape_text(x), true, 2.0 * x.bytes(),
           [=] { rope_apply(Stream::cpu(), x, table, positions, /*inverse=*/false); }}};
}

Cases activation_cases(const KernelBenchOptions& o) {
  const Tensor gate_up = random_floats({o.tokens, 2 * o.ffn});
  const Tensor grad_gate_up = random_floats({o.tokens, 2 * o.ffn});
  const Tensor x = random_floats({o.tokens, o.ffn});
  const Tensor out = random_floats({o.tokens, o.ffn});
  const Tensor grad = random_floats({o.tokens, o.ffn});
  const double bytes = static_cast<double>(x.bytes());
  return {{"swiglu_forward", shape_text(gate_up), true, 3 * bytes,
           [=] { swiglu_forward(Stream::cpu(), out, gate_up); }},
          {"swiglu_backward", shape_text(gate_up), true, 5 * bytes,
           [=] { swiglu_backward(Stream::cpu(), grad_gate_up, grad, gate_up); }},
          {"gelu_forward", shape_text(x), true, 2 * bytes,
           [=] { gelu_forward(Stream::cpu(), out, x); }},
          {"gelu_backward", shape_text(x), true, 3 * bytes,
           [=] { gelu_backward(Stream::cpu(), out, grad, x); }}};
}

Cases flat_cases(const KernelBenchOptions& o) {
  const int64_t n = o.parameters;
  const Tensor weight = random_floats({n});
  const Tensor m = random_floats({n});
  const Tensor v = Tensor::zeros({n}, DType::kFloat32);
  const Tensor grad = random_floats({n});
  const Tensor half({n}, DType::kBFloat16);
  const Tensor sum = Tensor::zeros({1}, DType::kFloat64);
  const std::vector<AdamwSegment> segments = {{0, n, 0.1f}};
  const Tensor control = Tensor::zeros({sizeof(StepControl)}, DType::kUInt8);
  *static_cast<StepControl*>(control.view().raw()) = {
      .apply = 1, .grad_scale = 1.0f, .step_size = 1e-3f, .inverse_root_correction = 1.0f};
  const double bytes = n * kFloatBytes;
  const std::string shape = shape_text(weight);
  return {{"adamw_step", shape, true, 7 * bytes,
           [=] { adamw_step(Stream::cpu(), weight, m, v, {}, grad, control, segments, {}); }},
          {"sum_of_squares", shape, true, bytes, [=] { sum_of_squares(Stream::cpu(), sum, grad); }},
          {"add", shape, true, 3 * bytes, [=] { add(Stream::cpu(), m, weight, grad); }},
          {"copy_cast float32 to bfloat16", shape, true, 1.5 * bytes,
           [=] { copy_cast(Stream::cpu(), half, grad); }},
          {"copy_cast bfloat16 to float32", shape, true, 1.5 * bytes,
           [=] { copy_cast(Stream::cpu(), m, half); }},
          {"fill_zero", shape, true, bytes, [=] { fill_zero(Stream::cpu(), m); }}};
}

Cases matmul_cases(const KernelBenchOptions& o) {
  const Tensor x = random_floats({o.tokens, o.dim});
  const Tensor grad_x = random_floats({o.tokens, o.dim});
  const Tensor weight = random_floats({2 * o.ffn, o.dim});
  const Tensor grad_weight = random_floats({2 * o.ffn, o.dim});
  const Tensor out = random_floats({o.tokens, 2 * o.ffn});
  const double flops = 2.0 * o.tokens * o.dim * 2 * o.ffn;
  const std::string shape = shape_text(x) + " x " + shape_text(weight);
  return {{"linear_forward", shape, false, flops,
           [=] { linear_forward(Stream::cpu(), out, x, weight); }},
          {"linear_backward", shape, false, 2 * flops,
           [=] { linear_backward(Stream::cpu(), grad_x, grad_weight, {}, out, x, weight); }}};
}

Cases attention_cases(const KernelBenchOptions& o) {
  const int64_t segment = std::min(o.segment, o.tokens);
  const int64_t count = o.tokens / segment;
  const int64_t tokens = count * segment;
  const Tensor q = random_floats({tokens, o.heads, o.head_dim});
  const Tensor k = random_floats({tokens, o.kv_heads, o.head_dim});
  const Tensor v = random_floats({tokens, o.kv_heads, o.head_dim});
  const Tensor out = random_floats({tokens, o.heads, o.head_dim});
  const Tensor grad_out = random_floats({tokens, o.heads, o.head_dim});
  const Tensor grad_q = random_floats({tokens, o.heads, o.head_dim});
  const Tensor grad_k = random_floats({tokens, o.kv_heads, o.head_dim});
  const Tensor grad_v = random_floats({tokens, o.kv_heads, o.head_dim});
  const Tensor lse = random_floats({o.heads, tokens});
  const Tensor cu_seqlens = arange(count + 1, segment);
  Cases cases;
  for (const bool causal : {true, false}) {
    const double keys = causal ? (segment + 1) / 2.0 : static_cast<double>(segment);
    const double flops = 4.0 * tokens * o.heads * o.head_dim * keys;
    const std::string shape = fmt::format("{} x {} of {}, {} kv heads{}", count, segment,
                                          fmt::format("{} x {}", o.heads, o.head_dim), o.kv_heads,
                                          causal ? ", causal" : "");
    const AttentionOptions options{.causal = causal};
    // The closures own cu_seqlens; views do not.
    const auto segments = [=] { return Segments{cu_seqlens, cu_seqlens, segment, segment}; };
    cases.push_back({"attention_forward", shape, false, flops, [=] {
                       attention_forward(Stream::cpu(), out, lse, q, k, v, segments(), options);
                     }});
    // Five products instead of two.
    cases.push_back({"attention_backward", shape, false, 2.5 * flops, [=] {
                       attention_backward(Stream::cpu(), grad_q, grad_k, grad_v, grad_out, q, k, v,
                                          out, lse, segments(), options);
                     }});
  }
  return cases;
}

Cases cross_entropy_cases(const KernelBenchOptions& o) {
  const Tensor hidden = random_floats({o.tokens, o.dim});
  const Tensor grad_hidden = random_floats({o.tokens, o.dim});
  const Tensor weight = random_floats({o.vocab, o.dim});
  const Tensor grad_weight = random_floats({o.vocab, o.dim});
  const Tensor targets = spread_ids(o.tokens, o.vocab);
  const Tensor loss = Tensor::zeros({1}, DType::kFloat64);
  const double flops = 2.0 * o.tokens * o.dim * o.vocab;
  const std::string shape = shape_text(hidden) + " x " + shape_text(weight);
  return {{"linear_cross_entropy_forward", shape, false, flops,
           [=] { linear_cross_entropy_forward(Stream::cpu(), loss, hidden, weight, targets); }},
          {"linear_cross_entropy_train", shape, false, 3 * flops, [=] {
             linear_cross_entropy_train(Stream::cpu(), loss, grad_hidden, grad_weight, hidden,
                                        weight, targets);
           }}};
}

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown processor";
}

}  // namespace

KernelBenchReport bench_kernels(const KernelBenchOptions& options,
                                const std::function<void(const KernelBenchRow&)>& on_row) {
  CacheFlusher flusher(options.flush_bytes);
  KernelBenchReport report;
  report.machine = processor_name();
  report.threads = omp_get_max_threads();
  report.copy_gb_per_s = measure_copy_gb_per_s(flusher, options.seconds);
  report.fma_gflop_per_s = measure_fma_gflop_per_s(options.seconds);
  // One family at a time, so that only its tensors are in memory.
  for (Cases (*make)(const KernelBenchOptions&) :
       {embedding_cases, norm_cases, rope_cases, activation_cases, flat_cases, matmul_cases,
        attention_cases, cross_entropy_cases}) {
    for (const Case& c : make(options)) {
      if (c.kernel.find(options.filter) == std::string::npos) continue;
      const Timing timing = time_runs(flusher, options.seconds, c.run);
      KernelBenchRow row{.kernel = c.kernel,
                         .shape = c.shape,
                         .runs = timing.runs,
                         .median_s = timing.median_s,
                         .memory_bound = c.memory_bound};
      row.rate = c.work / timing.median_s / 1e9;
      row.percent =
          100.0 * row.rate / (c.memory_bound ? report.copy_gb_per_s : report.fma_gflop_per_s);
      if (on_row) on_row(row);
      report.rows.push_back(std::move(row));
    }
  }
  return report;
}

}  // namespace muster
