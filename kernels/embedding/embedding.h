// Token (or position) embedding. All kernels of this folder tree share these rules:
// - Arguments are views; shapes, dtypes and devices are checked at the call (a mismatch is a CHECK,
// it is our bug).
// - Results come first, then inputs. A result is overwritten unless its comment says "accumulates".
// - Activations are float32 or bfloat16 (CPU: float32); weights have the activations' dtype; sums
// over tokens, statistics and
//   weight gradients are float32.
// - On CUDA the work is enqueued on `stream`; an event recorded after the call completes it. The
//   calling thread's current device is the stream's. Scratch memory is kept for each stream
//   (cuda/device.h). On the CPU the work is done on return.
// - Results do not depend on the number of threads: reductions have a fixed order.
#pragma once

#include "common/tensor.h"

namespace muster {

// out[n, :] = weight[ids[n], :]. out [N, D]; weight [V, D]; ids [N] int32, each in [0, V).
void embedding_forward(const Stream& stream, TensorView out, ConstTensorView weight,
                       ConstTensorView ids);

// order[i, :] = {token, id}: the tokens in order of their ids, equal ids in order of n. order [N,
// 2] int32; ids [N] int32, each in [0, vocab). A function of ids alone: whoever has them early can
// make it before the backward needs it, on another stream.
void embedding_order(const Stream& stream, TensorView order, ConstTensorView ids, int64_t vocab);

// grad_weight[ids[n], :] += grad_out[n, :], in a fixed order (CPU: of n). grad_weight [V, D]
// float32, accumulates; grad_out [N, D]. order, if defined, is embedding_order's; else a GPU makes
// it first, in scratch memory.
void embedding_backward(const Stream& stream, TensorView grad_weight, ConstTensorView grad_out,
                        ConstTensorView ids, ConstTensorView order = {});

}  // namespace muster
