#include "kernels/adamw/adamw.h"

#include "kernels/dispatch.h"
#include "kernels/step_control/step_control.h"

namespace muster {

MUSTER_TWINS(void adamw_step(const Stream& stream, TensorView weight, TensorView m, TensorView v,
                             TensorView low, ConstTensorView grad, ConstTensorView control,
                             std::span<const AdamwSegment> segments, const AdamwOptions& options);)

void adamw_step(const Stream& stream, TensorView weight, TensorView m, TensorView v, TensorView low,
                ConstTensorView grad, ConstTensorView control,
                std::span<const AdamwSegment> segments, const AdamwOptions& options) {
  const int64_t n = weight.numel();
  const auto check = [&](const ConstTensorView& view, DType dtype) {
    MUSTER_CHECK(view.rank() == 1 && view.numel() == n && view.contiguous(),
                 view.shape().to_string());
    MUSTER_CHECK(view.dtype() == dtype, name_of(view.dtype()));
    MUSTER_CHECK(view.device() == stream.device);
  };
  MUSTER_CHECK(
      m.dtype() == DType::kFloat32 || (m.dtype() == DType::kBFloat16 && !stream.device.is_cpu()),
      name_of(m.dtype()));
  check(weight, DType::kFloat32);
  check(m, m.dtype());
  check(v, m.dtype());
  check(grad, DType::kFloat32);
  if (low.defined()) check(low, DType::kBFloat16);
  check_step_control(stream, control);
  int64_t done = 0;
  for (const AdamwSegment& segment : segments) {
    MUSTER_CHECK(segment.begin >= done && segment.begin <= segment.end && segment.end <= n,
                 std::to_string(segment.begin) + " to " + std::to_string(segment.end));
    MUSTER_CHECK(segment.first_index >= 0, std::to_string(segment.first_index));
    done = segment.end;
  }
  MUSTER_DISPATCH(stream, adamw_step(stream, weight, m, v, low, grad, control, segments, options));
}

}  // namespace muster
