#include "kernels/attention/attention.h"
#include "kernels/attention/attention_testing.h"
#include "kernels/cuda/gpu_testing.h"

namespace muster {
namespace {

using namespace testing;
using AttentionGpuTest = GpuTest;

struct Setup {
  DType dtype = DType::kBFloat16;
  std::vector<int32_t> lengths_q;
  std::vector<int32_t> lengths_k;
  int64_t heads_q = 4;
  int64_t heads_k = 2;
  int64_t width = 64;
  bool causal = true;
  int64_t gap = 0;  // elements before and after each token's heads
  float scale = 0.0f;
  bool deterministic = true;
};

std::vector<int32_t> ends_of(const std::vector<int32_t>& lengths) {
  std::vector<int32_t> ends{0};
  for (const int32_t length : lengths) ends.push_back(ends.back() + length);
  return ends;
}

void check(const Setup& setup) {
  SCOPED_TRACE("heads " + Shape({setup.heads_q, setup.heads_k, setup.width}).to_string() +
               (setup.causal ? " causal " : " full ") + name_of(setup.dtype) +
               (setup.deterministic ? "" : ", any order"));
  const std::vector<int32_t> ends_q = ends_of(setup.lengths_q);
  const std::vector<int32_t> ends_k = ends_of(setup.lengths_k);
  const Shape shape_q{ends_q.back(), setup.heads_q, setup.width};
  const Shape shape_k{ends_k.back(), setup.heads_k, setup.width};
  const Layout layout_q{setup.gap, setup.heads_q * setup.width + 2 * setup.gap};
  const Layout layout_k{setup.gap, setup.heads_k * setup.width + 2 * setup.gap};
  Operand q = Operand::random(shape_q, setup.dtype, 1, 1.5, 0.0, layout_q);
  Operand k = Operand::random(shape_k, setup.dtype, 2, 1.5, 0.0, layout_k);
  Operand v = Operand::random(shape_k, setup.dtype, 3, 1.0, 0.0, layout_k);
  Operand cu_q = Operand::ints(ends_q);
  Operand cu_k = Operand::ints(ends_k);
  Operand out(shape_q, setup.dtype, layout_q);
  Operand lse({setup.heads_q, shape_q[0]}, DType::kFloat32);
  const auto segments = [&](const At& at) {
    return Segments{.cu_seqlens_q = at(cu_q),
                    .cu_seqlens_k = at(cu_k),
                    .max_q = *std::max_element(setup.lengths_q.begin(), setup.lengths_q.end()),
                    .max_k = *std::max_element(setup.lengths_k.begin(), setup.lengths_k.end())};
  };
  const AttentionOptions options{
      .scale = setup.scale, .causal = setup.causal, .deterministic = setup.deterministic};
  const auto forward = [&](const Stream& stream, const At& at) {
    attention_forward(stream, at(out), at(lse), at(q), at(k), at(v), segments(at), options);
  };
  expect_matches_cpu({&q, &k, &v, &cu_q, &cu_k}, {&out, &lse}, forward);

  forward(Stream::cpu(), At(false));
  out.round();
  Operand grad_out = Operand::random(shape_q, setup.dtype, 4, 1.0, 0.0, layout_q);
  Operand grad_q(shape_q, setup.dtype, layout_q);
  Operand grad_k(shape_k, setup.dtype, layout_k);
  Operand grad_v(shape_k, setup.dtype, layout_k);
  expect_matches_cpu(
      {&grad_out, &q, &k, &v, &out, &lse, &cu_q, &cu_k}, {&grad_q, &grad_k, &grad_v},
      [&](const Stream& stream, const At& at) {
        attention_backward(stream, at(grad_q), at(grad_k), at(grad_v), at(grad_out), at(q), at(k),
                           at(v), at(out), at(lse), segments(at), options);
      },
      4.0, setup.deterministic);
}

TEST_F(AttentionGpuTest, TensorCoresMatchTheCpu) {
  for (const int64_t width : {64, 128}) {
    for (const bool causal : {false, true}) {
      check({.lengths_q = {1}, .lengths_k = {1}, .width = width, .causal = causal});
      check({.lengths_q = {130, 7, 0, 301},
             .lengths_k = {130, 7, 0, 301},
             .width = width,
             .causal = causal,
             .gap = 64});
    }
  }
}

TEST_F(AttentionGpuTest, QueriesAndKeysOfDifferentLengths) {
  for (const int64_t width : {64, 128}) {
    for (const bool causal : {false, true}) {
      // The second segment's first queries see no key when causal; the third has none at all.
      check({.lengths_q = {3, 200, 5, 140},
             .lengths_k = {270, 65, 0, 140},
             .width = width,
             .causal = causal});
    }
  }
}

TEST_F(AttentionGpuTest, GroupsOfHeads) {
  check({.lengths_q = {150}, .lengths_k = {150}, .heads_q = 3, .heads_k = 3});
  check({.lengths_q = {150}, .lengths_k = {150}, .heads_q = 8, .heads_k = 1, .width = 128});
}

// More tiles than a pipeline has stages, tails of every kind, neighbours of other lengths; the
// order of the sums free and fixed.
TEST_F(AttentionGpuTest, ManyTilesAndTails) {
  for (const int64_t width : {64, 128}) {
    for (const bool causal : {false, true}) {
      for (const bool deterministic : {false, true}) {
        check({.lengths_q = {700, 1, 129, 0, 64, 65, 128, 200},
               .lengths_k = {700, 1, 129, 0, 64, 65, 128, 200},
               .width = width,
               .causal = causal,
               .gap = 128,
               .deterministic = deterministic});
        check({.lengths_q = {257, 2, 640},
               .lengths_k = {600, 300, 191},
               .heads_q = 3,
               .heads_k = 1,
               .width = width,
               .causal = causal,
               .deterministic = deterministic});
      }
    }
  }
}

TEST_F(AttentionGpuTest, ManyShortSegments) {
  std::vector<int32_t> lengths;
  lengths.reserve(80);
  for (int32_t i = 0; i < 80; ++i) lengths.push_back(i * 7 % 23);
  for (const int64_t width : {64, 128}) {
    check({.lengths_q = lengths, .lengths_k = lengths, .heads_q = 6, .width = width});
  }
}

TEST_F(AttentionGpuTest, NarrowHeadsAreFilledUp) {
  for (const int64_t width : {8, 40, 80, 96}) {
    check({.lengths_q = {100, 33}, .lengths_k = {100, 33}, .width = width, .gap = 8});
  }
}

TEST_F(AttentionGpuTest, ScaleIsAnOption) {
  check({.lengths_q = {90}, .lengths_k = {90}, .scale = 0.3f});
  check({.lengths_q = {90}, .lengths_k = {90}, .scale = -0.1f});
}

TEST_F(AttentionGpuTest, PortableKernelsMatchTheCpu) {
  for (const bool causal : {false, true}) {
    for (const int64_t width : {1, 7, 64, 200}) {
      check({.dtype = DType::kFloat32,
             .lengths_q = {3, 50, 0, 65},
             .lengths_k = {3, 61, 4, 40},
             .width = width,
             .causal = causal,
             .gap = 3});
    }
    check({.lengths_q = {40}, .lengths_k = {40}, .width = 7, .causal = causal});
    check({.lengths_q = {40}, .lengths_k = {40}, .width = 256, .causal = causal});
    check({.lengths_q = {40}, .lengths_k = {40}, .width = 64, .causal = causal, .gap = 1});
  }
}

// The bytes of every operand of a case from one side to the other.
void copy(const AttentionOperands& to, const AttentionOperands& from, cudaMemcpyKind kind) {
  for (size_t i = 0; i < to.memory.size(); ++i) {
    if (to.memory[i].bytes() == 0) continue;
    CUDA_CHECK(cudaMemcpy(to.memory[i].view().raw(), from.memory[i].view().raw(),
                          to.memory[i].bytes(), kind));
  }
  CUDA_CHECK(cudaDeviceSynchronize());
}

// Both directions on the GPU, from what `host` holds, into `host`.
void run_on_gpu(const AttentionCase& c, const AttentionOperands& host) {
  const AttentionOperands gpu(c, gpu_memory());
  copy(gpu, host, cudaMemcpyHostToDevice);
  gpu.forward(gpu_stream(), c.options);
  gpu.backward(gpu_stream(), c.options);
  CUDA_CHECK(cudaStreamSynchronize(static_cast<cudaStream_t>(gpu_stream().handle)));
  copy(host, gpu, cudaMemcpyDeviceToHost);
}

// The cases that the CPU passes, by the same bounds.
TEST_F(AttentionGpuTest, RandomCasesMatchTheReference) {
  for (uint64_t seed = 0; seed < 240; ++seed) {
    const AttentionCase c = random_attention_case(seed);
    const AttentionOperands operands(c, host_allocator());
    operands.fill();
    run_on_gpu(c, operands);
    expect_attention(c, result_of(operands), operands);
    const AttentionResult<float> first = result_of(operands);
    if (c.options.deterministic) {
      run_on_gpu(c, operands);
      const AttentionResult<float> second = result_of(operands);
      for (size_t i = 0; i < 5; ++i) {
        EXPECT_EQ(max_error(*parts_of(first)[i], *parts_of(second)[i]), 0.0) << c.to_string();
      }
    }
    operands.expect_gaps_untouched();
  }
}

TEST_F(AttentionGpuTest, TheMaskIsTheCpusBitForBit) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const AttentionCase c{.dtype = dtype,
                          .ends_q = {0, 201, 202, 256},
                          .ends_k = {0, 201, 202, 256},
                          .heads_q = 2,
                          .heads_k = 2,
                          .width = 256,
                          .options = {.causal = false,
                                      .window_left = 150,
                                      .dropout = 0.4f,
                                      .dropout_seed = 9,
                                      .dropout_offset = (uint64_t{1} << 40) + 3}};
    const AttentionOperands on_cpu(c, host_allocator());
    on_cpu.fill_one_hot();
    on_cpu.forward(Stream::cpu(), c.options);
    on_cpu.backward(Stream::cpu(), c.options);
    const AttentionOperands on_gpu(c, host_allocator());
    on_gpu.fill_one_hot();
    run_on_gpu(c, on_gpu);
    const auto expect_same_zeros = [](const TensorView& a, const TensorView& b) {
      const std::vector<float> x = AttentionOperands::read(a);
      const std::vector<float> y = AttentionOperands::read(b);
      for (size_t i = 0; i < x.size(); ++i) ASSERT_EQ(x[i] != 0.0f, y[i] != 0.0f) << i;
    };
    expect_same_zeros(on_cpu.out, on_gpu.out);
    expect_same_zeros(on_cpu.grad_v, on_gpu.grad_v);
  }
}

}  // namespace
}  // namespace muster
