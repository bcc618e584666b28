#include "kernels/init/init.h"

#include "kernels/dispatch.h"

namespace muster {

MUSTER_TWINS(void fill_normal(const Stream& stream, TensorView out, uint64_t seed,
                              uint64_t stream_key, int64_t first, double std);
             void fill_value(const Stream& stream, TensorView out, float value);)

namespace {

void check_out(const Stream& stream, const TensorView& out) {
  MUSTER_CHECK(out.dtype() == DType::kFloat32 && out.contiguous(), name_of(out.dtype()));
  MUSTER_CHECK(out.device() == stream.device);
}

}  // namespace

void fill_normal(const Stream& stream, TensorView out, uint64_t seed, uint64_t stream_key,
                 int64_t first, double std) {
  check_out(stream, out);
  MUSTER_CHECK(first >= 0, std::to_string(first));
  MUSTER_DISPATCH(stream, fill_normal(stream, out, seed, stream_key, first, std));
}

void fill_value(const Stream& stream, TensorView out, float value) {
  check_out(stream, out);
  MUSTER_DISPATCH(stream, fill_value(stream, out, value));
}

}  // namespace muster
