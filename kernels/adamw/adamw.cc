#include "kernels/adamw/adamw.h"

#include "kernels/dispatch.h"

namespace muster {

MUSTER_TWINS(void adamw_step(const Stream& stream, TensorView weight, TensorView m, TensorView v,
                             ConstTensorView grad, std::span<const AdamwSegment> segments,
                             const AdamwOptions& options);)

void adamw_step(const Stream& stream, TensorView weight, TensorView m, TensorView v,
                ConstTensorView grad, std::span<const AdamwSegment> segments,
                const AdamwOptions& options) {
  const int64_t n = weight.numel();
  for (const ConstTensorView& view :
       {ConstTensorView(weight), ConstTensorView(m), ConstTensorView(v), grad}) {
    MUSTER_CHECK(view.rank() == 1 && view.numel() == n && view.contiguous(),
                 view.shape().to_string());
    MUSTER_CHECK(view.dtype() == DType::kFloat32, name_of(view.dtype()));
    MUSTER_CHECK(view.device() == stream.device);
  }
  int64_t done = 0;
  for (const AdamwSegment& segment : segments) {
    MUSTER_CHECK(segment.begin >= done && segment.begin <= segment.end && segment.end <= n,
                 std::to_string(segment.begin) + " to " + std::to_string(segment.end));
    done = segment.end;
  }
  MUSTER_CHECK(options.step >= 1, std::to_string(options.step));
  MUSTER_DISPATCH(stream, adamw_step(stream, weight, m, v, grad, segments, options));
}

}  // namespace muster
