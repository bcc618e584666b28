// Which GPU kernels serve a call of attention, and what keeps it from faster ones. Pure, so that it
// is tested without a GPU.
#pragma once

#include <cstdint>

#include "common/tensor.h"
#include "kernels/attention/attention.h"

namespace muster {

enum class AttentionKernels : uint8_t { kHopper, kMma, kPortable };
const char* name_of(AttentionKernels kernels);

struct AttentionCall {
  DType dtype = DType::kBFloat16;
  int64_t width = 64;          // D
  bool aligned = true;         // every row of every operand begins at a multiple of 16 bytes
  bool mappable = true;        // tensor maps describe it: tokens on both sides, strides above 0
  bool hopper = false;         // the GPU and the build have the Hopper kernels
  AttentionOptions options{};  // resolved: what bounds or changes nothing is off
};

struct AttentionChoice {
  AttentionKernels kernels = AttentionKernels::kPortable;
  // What of the call keeps it from faster kernels that this GPU has; null: nothing does.
  const char* reason = nullptr;
};

// The fastest kernels that support the call; some always do.
AttentionChoice choose_attention_kernels(const AttentionCall& call);

// Logs the reason, if any, the first time in this process that it keeps a call from faster kernels.
void log_attention_choice(const AttentionChoice& choice);

}  // namespace muster
