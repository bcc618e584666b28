#include "kernels/attention/attention_choice.h"

#include <spdlog/spdlog.h>

#include <mutex>
#include <set>
#include <string>

namespace muster {

namespace {

bool windowed(const AttentionOptions& options) {
  return options.window_left >= 0 || options.window_right >= 0;
}

// What the tensor-core kernels of both kinds lack; null: nothing.
const char* beyond_tensor_cores(const AttentionCall& call) {
  if (call.options.logit_cap > 0.0f) return "a cap of the logits";
  if (call.options.dropout > 0.0f) return "dropout";
  if (call.dtype == DType::kFloat32) return "float32";
  if (call.width % 8 != 0) return "a head dimension that is no multiple of 8";
  if (call.width > 128) return "a head dimension above 128";
  // Their online maximum is one of unscaled products.
  if (!(call.options.scale > 0.0f)) return "a scale below 0";
  if (!call.aligned) return "rows that do not begin at multiples of 16 bytes";
  return nullptr;
}

const char* beyond_hopper(const AttentionCall& call) {
  if (windowed(call.options)) return "a sliding window";
  if (call.dtype != DType::kBFloat16) return "float16";
  if (call.width != 64 && call.width != 128) return "a head dimension other than 64 and 128";
  return nullptr;
}

}  // namespace

const char* name_of(AttentionKernels kernels) {
  switch (kernels) {
    case AttentionKernels::kHopper:
      return "Hopper";
    case AttentionKernels::kMma:
      return "mma";
    case AttentionKernels::kPortable:
      return "portable";
  }
  MUSTER_CHECK(false, "bad kernels");
}

AttentionChoice choose_attention_kernels(const AttentionCall& call) {
  if (const char* reason = beyond_tensor_cores(call)) return {AttentionKernels::kPortable, reason};
  if (!call.hopper || !call.mappable) return {AttentionKernels::kMma, nullptr};
  if (const char* reason = beyond_hopper(call)) return {AttentionKernels::kMma, reason};
  return {AttentionKernels::kHopper, nullptr};
}

void log_attention_choice(const AttentionChoice& choice) {
  if (choice.reason == nullptr) return;
  static std::mutex mutex;
  static std::set<std::string> logged;
  const std::lock_guard lock(mutex);
  if (!logged.insert(choice.reason).second) return;
  spdlog::info("attention: " + std::string(choice.reason) + " takes the " +
               name_of(choice.kernels) + " kernels instead of faster ones");
}

}  // namespace muster
