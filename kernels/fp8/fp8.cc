#include "kernels/fp8/fp8.h"

#include "kernels/dispatch.h"
#include "kernels/fp8/format.h"
#ifdef MUSTER_WITH_CUDA
#include "kernels/fp8/fp8_cuda.h"
#endif

namespace muster {

MUSTER_TWINS(void fp8_quantise(const Stream& stream, TensorView data, TensorView transposed,
                               TensorView scale, ConstTensorView x, ConstTensorView amax);
             void fp8_matmul(const Stream& stream, TensorView out, Fp8View a, Fp8View b,
                             const Fp8MatmulOptions& options);)

namespace {

constexpr int64_t kMultiple = 16;

bool is_multiple(int64_t size) {
  return size > 0 && size % kMultiple == 0;
}

void check_copy(const ConstTensorView& copy, const Stream& stream, int64_t rows, int64_t columns) {
  MUSTER_CHECK(copy.rank() == 2 && copy.size(0) == rows && copy.size(1) == columns,
               copy.shape().to_string() + ", expected " + Shape{rows, columns}.to_string());
  MUSTER_CHECK(is_fp8(copy.dtype()) && copy.contiguous() && copy.device() == stream.device,
               name_of(copy.dtype()));
}

void check_scale(const ConstTensorView& scale, const Stream& stream) {
  MUSTER_CHECK(scale.numel() == 1 && scale.dtype() == DType::kFloat32 &&
               scale.device() == stream.device);
}

void check_rows(const ConstTensorView& x, const Stream& stream, const char* name) {
  MUSTER_CHECK(x.rank() == 2 && x.device() == stream.device, name);
  MUSTER_CHECK((x.size(1) <= 1 || x.stride(1) == 1) && (x.size(0) <= 1 || x.stride(0) >= x.size(1)),
               name);
}

}  // namespace

bool fp8_supported(const Device& device) {
#ifdef MUSTER_WITH_CUDA
  if (device.is_cuda()) return cuda::fp8_supported(device.index);
#endif
  return !device.is_cuda();
}

bool fp8_fits(int64_t m, int64_t n, int64_t k) {
  return is_multiple(m) && is_multiple(n) && is_multiple(k);
}

void fp8_quantise(const Stream& stream, TensorView data, TensorView transposed, TensorView scale,
                  ConstTensorView x, ConstTensorView amax) {
  check_rows(x, stream, "x");
  MUSTER_CHECK(is_multiple(x.size(0)) && is_multiple(x.size(1)), x.shape().to_string());
  MUSTER_CHECK(data.defined() || transposed.defined());
  if (data.defined()) check_copy(data, stream, x.size(0), x.size(1));
  if (transposed.defined()) check_copy(transposed, stream, x.size(1), x.size(0));
  MUSTER_CHECK(!data.defined() || !transposed.defined() || data.dtype() == transposed.dtype());
  check_scale(scale, stream);
  if (amax.defined()) check_scale(amax, stream);
  MUSTER_DISPATCH(stream, fp8_quantise(stream, data, transposed, scale, x, amax));
}

Fp8Operand fp8_quantise(const Stream& stream, Allocator& memory, ConstTensorView x, DType format,
                        Fp8Copies copies, ConstTensorView amax) {
  MUSTER_CHECK(x.rank() == 2);
  Fp8Operand operand;
  if (copies != Fp8Copies::kTransposed) {
    operand.data = Tensor({x.size(0), x.size(1)}, format, memory);
  }
  if (copies != Fp8Copies::kData) {
    operand.transposed = Tensor({x.size(1), x.size(0)}, format, memory);
  }
  operand.scale = Tensor({1}, DType::kFloat32, memory);
  fp8_quantise(stream, operand.data, operand.transposed, operand.scale, x, amax);
  return operand;
}

void fp8_matmul(const Stream& stream, TensorView out, Fp8View a, Fp8View b,
                const Fp8MatmulOptions& options) {
  check_rows(out, stream, "out");
  const int64_t m = out.size(0);
  const int64_t n = out.size(1);
  MUSTER_CHECK(a.data.rank() == 2);
  const int64_t k = a.data.size(1);
  MUSTER_CHECK(fp8_fits(m, n, k), Shape({m, n, k}).to_string());
  check_copy(a.data, stream, m, k);
  check_copy(b.data, stream, n, k);
  check_scale(a.scale, stream);
  check_scale(b.scale, stream);
  MUSTER_CHECK(a.data.dtype() == DType::kFloat8E4M3 || b.data.dtype() == DType::kFloat8E4M3);
  if (options.bias.defined()) {
    MUSTER_CHECK(options.bias.rank() == 1 && options.bias.size(0) == n &&
                 options.bias.contiguous() && options.bias.dtype() == out.dtype() &&
                 options.bias.device() == stream.device);
  }
  if (options.addend.defined()) {
    check_rows(options.addend, stream, "addend");
    MUSTER_CHECK(options.addend.shape() == out.shape() && options.addend.dtype() == out.dtype());
  }
  MUSTER_DISPATCH(stream, fp8_matmul(stream, out, a, b, options));
}

}  // namespace muster
