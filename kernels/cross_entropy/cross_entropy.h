// Cross-entropy of a linear head, without the logits ever existing at once: the head's product is
// taken for a block of tokens and a chunk of the vocabulary rows at a time, with an online
// log-sum-exp.
#pragma once

#include "common/tensor.h"

namespace muster {

constexpr int64_t kMinCrossEntropyWorkspace = 4096;

struct CrossEntropyOptions {
  int32_t ignore_index = -1;
  bool accumulate_weight = true;  // false: grad_weight is overwritten
  // Upper bound of the scratch memory for logits, in bytes, on the CPU and on a GPU. A GPU takes
  // whole rows of logits, and larger chunks pay: each one reads and writes all of grad_weight.
  // On the CPU at least kMinCrossEntropyWorkspace; when the logits of 128 tokens do not fit,
  // training takes the head's product twice. The last bits of results may depend on it.
  int64_t workspace_bytes = 4 << 20;
  int64_t gpu_workspace_bytes = int64_t{512} << 20;
};

// For every token n with targets[n] ≠ ignore_index: loss_n = lse_n − z[n, targets[n]], z = hidden ·
// weightᵀ. loss_sum [1] float64, accumulates Σ loss_n in a fixed order. hidden [N, D]; weight [V,
// D]; targets [N] int32.
void linear_cross_entropy_forward(const Stream& stream, TensorView loss_sum, ConstTensorView hidden,
                                  ConstTensorView weight, ConstTensorView targets,
                                  const CrossEntropyOptions& options = {});

// The same loss, and at once its gradients (of the sum, unscaled): grad_hidden [N, D] overwritten
// (0 rows where ignored), grad_weight [V, D] float32, accumulates or is overwritten (see
// accumulate_weight). The loss is bitwise that of the forward alone.
void linear_cross_entropy_train(const Stream& stream, TensorView loss_sum, TensorView grad_hidden,
                                TensorView grad_weight, ConstTensorView hidden,
                                ConstTensorView weight, ConstTensorView targets,
                                const CrossEntropyOptions& options = {});

}  // namespace muster
