// The softmax between cross-entropy's products on a GPU.
#pragma once

#include "common/tensor.h"

namespace muster::cuda {

// For every row n of logits [N, V] (contiguous): losses[n] = log Σ e^z − z[targets[n]], or 0 where
// the target is ignored; with `gradient`, z becomes softmax(z) − onehot(target), or 0. The losses
// do not depend on `gradient`. targets [N] int32.
void softmax_loss(const Stream& stream, float* losses, TensorView logits, ConstTensorView targets,
                  int32_t ignore_index, bool gradient);

}  // namespace muster::cuda
