#include "kernels/embedding/embedding.h"

#include "kernels/dispatch.h"

namespace muster {

MUSTER_TWINS(void embedding_forward(const Stream& stream, TensorView out, ConstTensorView weight,
                                    ConstTensorView ids);
             void embedding_order(const Stream& stream, TensorView order, ConstTensorView ids,
                                  int64_t vocab);
             void embedding_backward(const Stream& stream, TensorView grad_weight,
                                     ConstTensorView grad_out, ConstTensorView ids,
                                     ConstTensorView order);)

namespace {

// `table` [V, D] and `rows` [N, D] with ids [N].
void check_shapes(const Stream& stream, const ConstTensorView& table, const ConstTensorView& rows,
                  const ConstTensorView& ids) {
  MUSTER_CHECK(table.rank() == 2 && rows.rank() == 2 && ids.rank() == 1);
  MUSTER_CHECK(rows.size(0) == ids.size(0) && rows.size(1) == table.size(1),
               rows.shape().to_string() + " for table " + table.shape().to_string());
  MUSTER_CHECK(ids.dtype() == DType::kInt32, name_of(ids.dtype()));
  MUSTER_CHECK(table.contiguous() && rows.contiguous() && ids.contiguous());
  MUSTER_CHECK(table.device() == stream.device && rows.device() == stream.device &&
               ids.device() == stream.device);
}

void check_order(const Stream& stream, const ConstTensorView& order, const ConstTensorView& ids) {
  MUSTER_CHECK(
      order.rank() == 2 && order.size(0) == ids.size(0) && order.size(1) == 2 && order.contiguous(),
      order.shape().to_string());
  MUSTER_CHECK(order.dtype() == DType::kInt32, name_of(order.dtype()));
  MUSTER_CHECK(order.device() == stream.device);
}

}  // namespace

void embedding_forward(const Stream& stream, TensorView out, ConstTensorView weight,
                       ConstTensorView ids) {
  check_shapes(stream, weight, out, ids);
  MUSTER_CHECK(out.dtype() == weight.dtype(), name_of(out.dtype()));
  MUSTER_DISPATCH(stream, embedding_forward(stream, out, weight, ids));
}

void embedding_order(const Stream& stream, TensorView order, ConstTensorView ids, int64_t vocab) {
  MUSTER_CHECK(ids.rank() == 1 && ids.contiguous() && ids.dtype() == DType::kInt32);
  MUSTER_CHECK(ids.device() == stream.device && vocab > 0);
  check_order(stream, order, ids);
  MUSTER_DISPATCH(stream, embedding_order(stream, order, ids, vocab));
}

void embedding_backward(const Stream& stream, TensorView grad_weight, ConstTensorView grad_out,
                        ConstTensorView ids, ConstTensorView order) {
  check_shapes(stream, grad_weight, grad_out, ids);
  MUSTER_CHECK(grad_weight.dtype() == DType::kFloat32, name_of(grad_weight.dtype()));
  if (order.defined()) check_order(stream, order, ids);
  MUSTER_DISPATCH(stream, embedding_backward(stream, grad_weight, grad_out, ids, order));
}

}  // namespace muster
