// Matrix products through cuBLASLt (product_cuda.h): inputs float32 or bfloat16 (both alike), the
// result in the inputs' dtype or in float32.
#include <algorithm>

#include "kernels/cuda/column_sums.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/vec.cuh"
#include "kernels/gelu/gelu.h"
#include "kernels/matmul/matmul.h"
#include "kernels/matmul/product_cuda.h"

namespace muster::cuda {
namespace {

constexpr int kPortableThreads = 128;
constexpr int64_t kGeluScratchBytes = 128 << 20;

// For shapes that cuBLASLt refuses: a thread an element, summed in order of k.
struct PortableShape {
  int64_t n, k, stride_out, stride_a, stride_b, stride_addend;
  bool transpose_a, transpose_b;
};

template <typename Out, typename In>
__global__ void portable_kernel(Out* out, const In* a, const In* b, const Out* addend,
                                const Out* bias, PortableShape shape) {
  const int64_t row = blockIdx.x;
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kPortableThreads + threadIdx.x;
  if (column >= shape.n) return;
  float sum = bias == nullptr ? 0.0f : to_float(bias[column]);
  for (int64_t k = 0; k < shape.k; ++k) {
    const In left = shape.transpose_a ? a[k * shape.stride_a + row] : a[row * shape.stride_a + k];
    const In right =
        shape.transpose_b ? b[column * shape.stride_b + k] : b[k * shape.stride_b + column];
    sum = fmaf(to_float(left), to_float(right), sum);
  }
  if (addend != nullptr) sum += to_float(addend[row * shape.stride_addend + column]);
  out[row * shape.stride_out + column] = from_float<Out>(sum);
}

void multiply_portably(const Stream& stream, const Product& product) {
  const PortableShape shape{
      .n = product.out.size(1),
      .k = product.a.size(product.transpose_a ? 0 : 1),
      .stride_out = product.out.stride(0),
      .stride_a = product.a.stride(0),
      .stride_b = product.b.stride(0),
      .stride_addend = product.addend.defined() ? product.addend.stride(0) : 0,
      .transpose_a = product.transpose_a,
      .transpose_b = product.transpose_b};
  const dim3 grid(static_cast<unsigned>(product.out.size(0)),
                  static_cast<unsigned>(ceil_div(shape.n, kPortableThreads)));
  with_activation(product.out.dtype(), [&](auto* out_type) {
    with_activation(product.a.dtype(), [&](auto* in_type) {
      using Out = std::remove_pointer_t<decltype(out_type)>;
      using In = std::remove_pointer_t<decltype(in_type)>;
      portable_kernel<<<grid, kPortableThreads, 0, handle_of(stream)>>>(
          static_cast<Out*>(product.out.raw()), static_cast<const In*>(product.a.raw()),
          static_cast<const In*>(product.b.raw()), static_cast<const Out*>(product.addend.raw()),
          static_cast<const Out*>(product.bias), shape);
    });
  });
  CUDA_CHECK(cudaGetLastError());
}

// A product without an epilogue.
void multiply_anyhow(const Stream& stream, const Product& product) {
  MUSTER_CHECK(
      product.a.dtype() == product.b.dtype() &&
          (product.out.dtype() == product.a.dtype() || product.out.dtype() == DType::kFloat32),
      name_of(product.out.dtype()));
  if (product.out.numel() == 0) return;
  const bool empty_sum = product.a.size(product.transpose_a ? 0 : 1) == 0;
  if (empty_sum || !multiply(stream, product)) multiply_portably(stream, product);
}

Product without_epilogue(Product product, TensorView out) {
  product.epilogue = Epilogue::kNone;
  product.hidden = {};
  product.out = out;
  return product;
}

bool gelu_in_parts(const Stream& stream, const Product& product) {
  multiply_anyhow(stream, without_epilogue(product, product.hidden));
  gelu_forward(stream, product.out, product.hidden);
  return true;
}

bool gelu_backward_in_parts(const Stream& stream, const Product& product) {
  const TensorView& out = product.out;
  const int64_t rows = out.size(0);
  const bool in_place = out.raw() == product.hidden.raw();
  // In place the product goes through scratch memory, some rows at a time.
  const int64_t row_bytes = out.size(1) * static_cast<int64_t>(size_of(out.dtype()));
  const int64_t step = in_place ? std::max<int64_t>(kGeluScratchBytes / row_bytes / 128 * 128, 128)
                                : std::max<int64_t>(rows, 1);
  for (int64_t begin = 0; begin < rows; begin += step) {
    const int64_t end = std::min(rows, begin + step);
    const TensorView to = out.slice(begin, end);
    TensorView grad = to;
    if (in_place) {
      grad = TensorView(workspace(stream, Scratch::kOp, std::min(rows, step) * row_bytes),
                        out.dtype(), to.shape(), stream.device);
    }
    Product part = without_epilogue(product, grad);
    part.a = product.a.slice(begin, end);
    multiply_anyhow(stream, part);
    gelu_backward(stream, to, grad, product.hidden.slice(begin, end));
  }
  return true;
}

// A product with its epilogue, fused or not. cuBLASLt's GELU is exact to bfloat16 only, and some of
// its kernels give wrong results in place.
void multiply_with_gelu(const Stream& stream, const Product& product,
                        bool (*parts)(const Stream&, const Product&)) {
  if (product.out.numel() == 0) return;
  const bool may_fuse = product.out.dtype() == DType::kBFloat16 && product.b.numel() > 0 &&
                        product.out.raw() != product.hidden.raw();
  if (may_fuse && fused_pays(stream, product, multiply, parts)) {
    if (multiply(stream, product)) return;
  }
  parts(stream, product);
}

}  // namespace

void matmul(const Stream& stream, TensorView out, ConstTensorView a, ConstTensorView b,
            const MatmulOptions& options) {
  multiply_anyhow(stream, {.out = out,
                           .a = a,
                           .b = b,
                           .transpose_a = options.transpose_a,
                           .transpose_b = options.transpose_b,
                           .addend = options.accumulate ? out : TensorView()});
}

void linear_forward(const Stream& stream, TensorView out, ConstTensorView x, ConstTensorView weight,
                    ConstTensorView bias, ConstTensorView residual) {
  multiply_anyhow(stream, {.out = out,
                           .a = x,
                           .b = weight,
                           .transpose_b = true,
                           .addend = residual,
                           .bias = bias.raw()});
}

void linear_gelu_forward(const Stream& stream, TensorView out, TensorView hidden, ConstTensorView x,
                         ConstTensorView weight, ConstTensorView bias) {
  multiply_with_gelu(stream,
                     {.out = out,
                      .a = x,
                      .b = weight,
                      .transpose_b = true,
                      .bias = bias.raw(),
                      .epilogue = Epilogue::kGelu,
                      .hidden = hidden},
                     gelu_in_parts);
}

void linear_backward(const Stream& stream, TensorView grad_x, TensorView grad_weight,
                     TensorView grad_bias, ConstTensorView grad_out, ConstTensorView x,
                     ConstTensorView weight, bool accumulate_weight) {
  if (grad_x.defined()) multiply_anyhow(stream, {.out = grad_x, .a = grad_out, .b = weight});
  if (grad_weight.defined()) {
    multiply_anyhow(stream, {.out = grad_weight,
                             .a = grad_out,
                             .b = x,
                             .transpose_a = true,
                             .addend = accumulate_weight ? grad_weight : TensorView()});
  }
  if (grad_bias.defined()) add_column_sums(stream, grad_bias.data<float>(), grad_out);
}

void linear_gelu_backward(const Stream& stream, TensorView grad_hidden, TensorView grad_bias,
                          ConstTensorView grad_out, ConstTensorView weight,
                          ConstTensorView hidden) {
  // The hidden values are only read.
  const TensorView aux(const_cast<void*>(hidden.raw()), hidden.dtype(), hidden.shape(),
                       stream.device);
  multiply_with_gelu(stream,
                     {.out = grad_hidden,
                      .a = grad_out,
                      .b = weight,
                      .epilogue = Epilogue::kGeluBackward,
                      .hidden = aux},
                     gelu_backward_in_parts);
  if (grad_bias.defined()) add_column_sums(stream, grad_bias.data<float>(), grad_hidden);
}

}  // namespace muster::cuda
