#include "kernels/cuda/gpu_testing.h"
#include "kernels/step_control/step_control.h"

namespace muster {
namespace {

using namespace testing;
using StepControlGpuTest = GpuTest;

// The GPU decides as the CPU does, to the bit: a mixed cluster must not part ways.
TEST_F(StepControlGpuTest, DecidesAsTheCpuToTheBit) {
  const StepRules rules{
      .lr = 3e-4, .beta1 = 0.9, .beta2 = 0.95, .clip_norm = 1.0, .spike_factor = 3.0};
  const Tensor state({sizeof(StepControl)}, DType::kUInt8, gpu_memory());
  const Tensor sums({3}, DType::kFloat64, gpu_memory());
  StepControl want;
  CUDA_CHECK(cudaMemcpy(state.view().raw(), &want, sizeof(want), cudaMemcpyHostToDevice));
  const CounterRng rng(3, RandomPurpose::kInit, 0);
  for (int step = 0; step < 300; ++step) {
    const double tokens = 1000.0 + step;
    double values[3] = {rng.uniform(2 * step) * 2.0 * tokens * tokens,
                        (1.0 + 3.0 * rng.uniform(2 * step + 1)) * tokens, tokens};
    if (step % 50 == 13) values[0] = std::numeric_limits<double>::infinity();
    if (step % 50 == 14) values[1] = kPoison;
    if (step % 50 == 15) values[1] *= 100.0;
    alignas(16) StepControl host = want;
    decide_step(Stream::cpu(), TensorView(&host, DType::kUInt8, {sizeof(StepControl)}),
                ConstTensorView(values, DType::kFloat64, {3}), rules);
    want = host;
    CUDA_CHECK(cudaMemcpy(sums.view().raw(), values, sizeof(values), cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaDeviceSynchronize());
    decide_step(gpu_stream(), state, sums, rules);
    CUDA_CHECK(cudaStreamSynchronize(static_cast<cudaStream_t>(gpu_stream().handle)));
    StepControl got;
    CUDA_CHECK(cudaMemcpy(&got, state.view().raw(), sizeof(got), cudaMemcpyDeviceToHost));
    const auto same = [step](double a, double b, const char* field) {
      EXPECT_TRUE(a == b || (std::isnan(a) && std::isnan(b)))
          << field << " of step " << step << ": " << a << " and " << b;
    };
    EXPECT_EQ(got.updates, want.updates);
    EXPECT_EQ(got.tokens, want.tokens);
    EXPECT_EQ(got.skips_in_row, want.skips_in_row);
    EXPECT_EQ(got.apply, want.apply);
    EXPECT_EQ(got.reason, want.reason);
    same(got.loss_mean, want.loss_mean, "loss_mean");
    same(got.loss, want.loss, "loss");
    same(got.step_tokens, want.step_tokens, "step_tokens");
    same(got.grad_norm, want.grad_norm, "grad_norm");
    same(got.loss_mean_before, want.loss_mean_before, "loss_mean_before");
    same(got.grad_scale, want.grad_scale, "grad_scale");
    same(got.step_size, want.step_size, "step_size");
    same(got.inverse_root_correction, want.inverse_root_correction, "inverse_root_correction");
  }
  EXPECT_GT(want.updates, 250);
}

}  // namespace
}  // namespace muster
