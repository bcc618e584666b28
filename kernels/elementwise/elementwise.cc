#include "kernels/elementwise/elementwise.h"

#include "kernels/dispatch.h"

namespace muster {

MUSTER_TWINS(void fill_zero(const Stream& stream, TensorView out);
             void copy_cast(const Stream& stream, TensorView out, ConstTensorView x);
             void add(const Stream& stream, TensorView out, ConstTensorView a, ConstTensorView b);)

namespace {

bool is_real(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

}  // namespace

void fill_zero(const Stream& stream, TensorView out) {
  MUSTER_CHECK(out.contiguous() && out.device() == stream.device);
  MUSTER_DISPATCH(stream, fill_zero(stream, out));
}

void copy_cast(const Stream& stream, TensorView out, ConstTensorView x) {
  MUSTER_CHECK(out.numel() == x.numel(),
               out.shape().to_string() + " from " + x.shape().to_string());
  MUSTER_CHECK(out.contiguous() && x.contiguous());
  MUSTER_CHECK(out.device() == stream.device && x.device() == stream.device);
  MUSTER_CHECK(out.dtype() == x.dtype() || (is_real(out.dtype()) && is_real(x.dtype())),
               std::string(name_of(x.dtype())) + " to " + name_of(out.dtype()));
  MUSTER_DISPATCH(stream, copy_cast(stream, out, x));
}

void add(const Stream& stream, TensorView out, ConstTensorView a, ConstTensorView b) {
  MUSTER_CHECK(out.numel() == a.numel() && out.numel() == b.numel(), out.shape().to_string());
  MUSTER_CHECK(out.dtype() == a.dtype() && out.dtype() == b.dtype(), name_of(out.dtype()));
  MUSTER_CHECK(out.contiguous() && a.contiguous() && b.contiguous());
  MUSTER_CHECK(out.device() == stream.device && a.device() == stream.device &&
               b.device() == stream.device);
  MUSTER_DISPATCH(stream, add(stream, out, a, b));
}

}  // namespace muster
