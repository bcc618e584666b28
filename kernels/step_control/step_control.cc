#include "kernels/step_control/step_control.h"

#include "kernels/dispatch.h"

namespace muster {

MUSTER_TWINS(void decide_step(const Stream& stream, TensorView control, ConstTensorView sums,
                              const StepRules& rules);)

void decide_step(const Stream& stream, TensorView control, ConstTensorView sums,
                 const StepRules& rules) {
  check_step_control(stream, control);
  MUSTER_CHECK(sums.numel() == 3 && sums.contiguous() && sums.dtype() == DType::kFloat64,
               sums.shape().to_string());
  MUSTER_CHECK(sums.device() == stream.device);
  MUSTER_DISPATCH(stream, decide_step(stream, control, sums, rules));
}

void check_step_control(const Stream& stream, const ConstTensorView& control) {
  MUSTER_CHECK(control.dtype() == DType::kUInt8 && control.contiguous() &&
                   control.bytes() == sizeof(StepControl),
               control.shape().to_string());
  MUSTER_CHECK(reinterpret_cast<uintptr_t>(control.raw()) % 16 == 0);
  MUSTER_CHECK(control.device() == stream.device);
}

}  // namespace muster
