#include "kernels/attention/attention.h"

#include <cmath>

#include "kernels/dispatch.h"

namespace muster {

MUSTER_TWINS(void attention_forward(const Stream& stream, TensorView out, TensorView lse,
                                    ConstTensorView q, ConstTensorView k, ConstTensorView v,
                                    const Segments& segments, const AttentionOptions& options);
             void attention_backward(const Stream& stream, TensorView grad_q, TensorView grad_k,
                                     TensorView grad_v, ConstTensorView grad_out, ConstTensorView q,
                                     ConstTensorView k, ConstTensorView v, ConstTensorView out,
                                     ConstTensorView lse, const Segments& segments,
                                     const AttentionOptions& options);)

namespace {

void check_heads(const ConstTensorView& x, const ConstTensorView& like, const Stream& stream,
                 const char* name) {
  MUSTER_CHECK(
      x.rank() == 3 && x.shape() == like.shape(),
      std::string(name) + " " + x.shape().to_string() + ", expected " + like.shape().to_string());
  MUSTER_CHECK(x.size(2) <= 1 || x.stride(2) == 1, name);
  MUSTER_CHECK(x.dtype() == like.dtype() && x.device() == stream.device, name);
}

void check_segments(const ConstTensorView& cu_seqlens, const Stream& stream, int64_t count,
                    const char* name) {
  MUSTER_CHECK(cu_seqlens.rank() == 1 && cu_seqlens.size(0) == count && count >= 1 &&
                   cu_seqlens.contiguous() && cu_seqlens.dtype() == DType::kInt32 &&
                   cu_seqlens.device() == stream.device,
               std::string(name) + " " + cu_seqlens.shape().to_string());
}

// What both directions share: q [Nq, Hq, D], k and v [Nk, Hk, D], lse [Hq, Nq].
void check_inputs(const Stream& stream, const ConstTensorView& q, const ConstTensorView& k,
                  const ConstTensorView& v, const ConstTensorView& lse, const Segments& segments) {
  check_heads(q, q, stream, "q");
  check_heads(k, k, stream, "k");
  check_heads(v, k, stream, "v");
  MUSTER_CHECK(q.dtype() == k.dtype());
  MUSTER_CHECK(
      q.dtype() == DType::kFloat32 || q.dtype() == DType::kBFloat16 || q.dtype() == DType::kFloat16,
      name_of(q.dtype()));
  MUSTER_CHECK(k.size(2) == q.size(2) && k.size(1) > 0 && q.size(1) % k.size(1) == 0,
               "q " + q.shape().to_string() + " with k " + k.shape().to_string());
  MUSTER_CHECK(lse.shape() == (Shape{q.size(1), q.size(0)}) && lse.contiguous() &&
                   lse.dtype() == DType::kFloat32 && lse.device() == stream.device,
               "lse " + lse.shape().to_string());
  const int64_t count = segments.cu_seqlens_q.size(0);
  check_segments(segments.cu_seqlens_q, stream, count, "cu_seqlens_q");
  check_segments(segments.cu_seqlens_k, stream, count, "cu_seqlens_k");
}

// One way to say each thing: the scale that is meant, and a window only where it bounds something
// that the segments' lengths and `causal` leave open.
AttentionOptions resolved(AttentionOptions options, const Segments& segments, int64_t head_dim) {
  MUSTER_CHECK(options.window_left >= -1 && options.window_right >= -1, "window");
  MUSTER_CHECK(options.logit_cap >= 0.0f && std::isfinite(options.logit_cap), "logit_cap");
  MUSTER_CHECK(options.dropout >= 0.0f && options.dropout < 1.0f, "dropout");
  if (options.scale == 0.0f) options.scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  if (options.window_right == 0) options.causal = true;
  if (options.causal || options.window_right >= segments.max_q - 1) options.window_right = -1;
  if (options.window_left >= segments.max_k - 1) options.window_left = -1;
  return options;
}

}  // namespace

void attention_forward(const Stream& stream, TensorView out, TensorView lse, ConstTensorView q,
                       ConstTensorView k, ConstTensorView v, const Segments& segments,
                       const AttentionOptions& options) {
  check_inputs(stream, q, k, v, lse, segments);
  check_heads(out, q, stream, "out");
  MUSTER_DISPATCH(stream, attention_forward(stream, out, lse, q, k, v, segments,
                                            resolved(options, segments, q.size(2))));
}

void attention_backward(const Stream& stream, TensorView grad_q, TensorView grad_k,
                        TensorView grad_v, ConstTensorView grad_out, ConstTensorView q,
                        ConstTensorView k, ConstTensorView v, ConstTensorView out,
                        ConstTensorView lse, const Segments& segments,
                        const AttentionOptions& options) {
  check_inputs(stream, q, k, v, lse, segments);
  check_heads(out, q, stream, "out");
  check_heads(grad_out, q, stream, "grad_out");
  check_heads(grad_q, q, stream, "grad_q");
  check_heads(grad_k, k, stream, "grad_k");
  check_heads(grad_v, k, stream, "grad_v");
  MUSTER_DISPATCH(stream,
                  attention_backward(stream, grad_q, grad_k, grad_v, grad_out, q, k, v, out, lse,
                                     segments, resolved(options, segments, q.size(2))));
}

}  // namespace muster
