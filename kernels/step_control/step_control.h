// What a training step decides about its update, kept where the update runs: the host reads it
// later, and no step waits for it.
#pragma once

#include <cstdint>

#include "common/tensor.h"

namespace muster {

enum class SkipReason : int32_t { kNone = 0, kLossNotFinite, kLossSpike, kGradNormNotFinite };

// Lies on the stream's device as a tensor of uint8 [sizeof(StepControl)], 16-byte aligned.
struct StepControl {
  // What lasts from step to step.
  int64_t updates = 0;     // applied ones
  int64_t tokens = 0;      // target tokens seen
  double loss_mean = 0.0;  // running mean of applied losses; 0 before the first
  int64_t skips_in_row = 0;
  // Of the step decided last.
  double loss = 0.0;         // mean over the target tokens of the global batch
  double step_tokens = 0.0;  // those tokens
  double grad_norm = 0.0;    // of the mean gradient, before clipping
  double loss_mean_before = 0.0;
  int32_t apply = 0;
  SkipReason reason = SkipReason::kNone;
  // What AdamW multiplies with; meaningful while `apply`.
  float grad_scale = 0.0f;               // 1 / tokens, times the clipping factor
  float step_size = 0.0f;                // lr / (1 − β1^updates)
  float inverse_root_correction = 0.0f;  // 1 / √(1 − β2^updates)
};

struct StepRules {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double clip_norm = 0.0;     // 0 = off
  double spike_factor = 0.0;  // skip when the loss exceeds this times the running mean; 0 = off
};

// Weight of the newest loss in the running mean: about the last fifty steps count.
constexpr double kLossMeanDecay = 0.02;

// sums [3] float64, over the whole global batch: Σ g² of the unscaled gradients, Σ loss, Σ target
// tokens. Skips (apply = 0) a loss or norm that is not finite, or a spike; else counts the update
// and sets its factors. `updates` then includes this one. A step's result is a function of control
// and sums alone, so that ranks with equal sums decide alike.
void decide_step(const Stream& stream, TensorView control, ConstTensorView sums,
                 const StepRules& rules);

// A CHECK that the view is a StepControl on the stream's device.
void check_step_control(const Stream& stream, const ConstTensorView& control);

}  // namespace muster
