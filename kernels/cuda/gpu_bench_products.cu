#include <array>

#include "kernels/cross_entropy/cross_entropy.h"
#include "kernels/cuda/gpu_bench_runner.cuh"
#include "kernels/fp8/fp8.h"
#include "kernels/gelu/gelu.h"
#include "kernels/matmul/matmul.h"

namespace muster::cuda {
namespace {

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

}  // namespace

void bench_all_products(Bench& bench) {
  bench_products(bench);
  bench_linear_gelu(bench);
  bench_fp8(bench);
  bench_cross_entropy(bench);
}

}  // namespace muster::cuda
