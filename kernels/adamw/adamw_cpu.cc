#include <cmath>

#include "kernels/adamw/adamw.h"
#include "kernels/adamw/constants.h"
#include "kernels/blocks.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/step_control/step_control.h"

namespace muster::cpu {
namespace {

// Every multiply-add is an explicit fma, so that an element's result does not depend on whether the
// vector body or the tail of the loop computes it, that is, on where its shard begins.
void update(float* weight, float* m, float* v, const float* grad, int64_t n, float decay,
            const StepControl& control, const AdamwConstants& constants) {
  const AdamwConstants c = constants;
  const float grad_scale = control.grad_scale;
  const float step_size = control.step_size;
  const float inverse_root_correction = control.inverse_root_correction;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float g = grad[i] * grad_scale;
    const float mean = std::fma(c.beta1, m[i], c.one_minus_beta1 * g);
    const float square = std::fma(c.beta2, v[i], c.one_minus_beta2 * g * g);
    const float root = std::fma(std::sqrt(square), inverse_root_correction, c.eps);
    // The decay is subtracted with the step, not as weight · (1 − lr · decay): float32 would round
    // that factor, the same way each time.
    const float change = std::fma(decay, weight[i], step_size * mean / root);
    m[i] = mean;
    v[i] = square;
    weight[i] -= change;
  }
}

}  // namespace

void adamw_step(const Stream& stream, TensorView weight, TensorView m, TensorView v, TensorView low,
                ConstTensorView grad, ConstTensorView control,
                std::span<const AdamwSegment> segments, const AdamwOptions& options) {
  const StepControl state = *static_cast<const StepControl*>(control.raw());
  if (state.apply == 0) return;
  const AdamwConstants constants(options);
  float* w = weight.data<float>();
  float* mean = m.data<float>();
  float* square = v.data<float>();
  const float* g = grad.data<float>();
  // Segments are cut at block borders, and threads share blocks: many small segments (biases,
  // norms) cost no more than one large one.
  for_blocks(weight.numel(), [&](int64_t begin, int64_t end) {
    auto segment = std::partition_point(segments.begin(), segments.end(),
                                        [&](const AdamwSegment& s) { return s.end <= begin; });
    for (; segment != segments.end() && segment->begin < end; ++segment) {
      const int64_t from = std::max(begin, segment->begin);
      const int64_t to = std::min(end, segment->end);
      const float decay = static_cast<float>(options.lr * segment->weight_decay);
      update(w + from, mean + from, square + from, g + from, to - from, decay, state, constants);
      if (low.defined()) muster::copy_cast(stream, low.slice(from, to), weight.slice(from, to));
    }
  });
}

}  // namespace muster::cpu
