// Tokens go by blocks, one after the other; a block's threads share its rows. Where a block's
// logits for the whole vocabulary fit in the workspace, the gradient is made from them in place;
// otherwise a first pass finds each row's log-sum-exp over chunks of the vocabulary and a second
// one takes the chunks' product again. Both entry points run the same first pass over the same
// blocks, which is why their losses agree in every bit.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/cross_entropy/cross_entropy.h"
#include "kernels/matmul/gemm_cpu.h"
#include "kernels/vector_math.h"

namespace muster::cpu {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kRows = 128;  // of a thread's turn: its logits stay in L2 at a byte vocabulary

// A row's online softmax, and its target's logit once the chunk that holds it has come by.
struct RowState {
  float max = -kInfinity;
  float sum = 0.0f;
  float target = 0.0f;
};

// Rows of logits lie `pitch` floats apart, whole vectors; what lies behind the columns is not used.
int64_t pitch_of(int64_t columns) {
  return (columns + kLanes - 1) / kLanes * kLanes;
}

// Sizes of a block of tokens and of a chunk of the vocabulary.
struct Plan {
  Plan(int64_t tokens, int64_t vocabulary, int64_t workspace_bytes) {
    const int64_t floats = workspace_bytes / static_cast<int64_t>(sizeof(float));
    block = std::min(floats / pitch_of(vocabulary), 8 * kRows);
    chunk = vocabulary;
    if (block >= std::min(kRows, tokens)) return;
    // Recomputing: as many tokens as leave a chunk of 1024, so that the weights are read rarely.
    block = std::clamp<int64_t>(floats / 1024, kLanes, 8 * kRows);
    chunk = std::min(vocabulary, floats / block / kLanes * kLanes);
  }
  int64_t block = 0;
  int64_t chunk = 0;
};

// Takes `columns` logits of each row into its state; columns [0, columns) of the chunk are the
// vocabulary's from `first` on. The logits become exp(logit − state.max).
MUSTER_SIMD_CLONES void softmax_rows(float* logits, int64_t pitch, int64_t rows, int64_t columns,
                                     int64_t first, const int32_t* targets, RowState* state) {
  for (int64_t r = 0; r < rows; ++r, logits += pitch) {
    const int64_t target = targets[r] - first;
    if (target >= 0 && target < columns) state[r].target = logits[target];
    const Vec nothing = broadcast(-kInfinity);
    Vec top = nothing;
    for (int64_t j = 0; j < columns; j += kLanes) {
      top = max(top, choose_first(columns - j, load(logits + j), nothing));
    }
    const float before = state[r].max;
    const float now = std::max(before, reduce_max(top));
    Vec sum{};
    for (int64_t j = 0; j < columns; j += kLanes) {
      const Vec e = choose_first(columns - j, softmax_exp(load(logits + j) - now), Vec{});
      store(logits + j, e);
      sum += e;
    }
    state[r].sum = state[r].sum * fast_exp(before - now) + reduce_add(sum);
    state[r].max = now;
  }
}

// Turns exp(logit − max), or logits when `recomputed`, into the gradient of the row's loss:
// probability minus one at the target, 0 in rows that are ignored.
MUSTER_SIMD_CLONES void gradient_rows(float* logits, int64_t pitch, int64_t rows, int64_t columns,
                                      int64_t first, const int32_t* targets, const RowState* state,
                                      int32_t ignore_index, bool recomputed) {
  for (int64_t r = 0; r < rows; ++r, logits += pitch) {
    const float scale = targets[r] == ignore_index ? 0.0f : 1.0f / state[r].sum;
    for (int64_t j = 0; j < columns; j += kLanes) {
      const Vec x = load(logits + j);
      store(logits + j, (recomputed ? softmax_exp(x - state[r].max) : x) * scale);
    }
    const int64_t target = targets[r] - first;
    if (target >= 0 && target < columns && targets[r] != ignore_index) logits[target] -= 1.0f;
  }
}

class LinearCrossEntropy {
 public:
  LinearCrossEntropy(ConstTensorView hidden, ConstTensorView weight, ConstTensorView targets,
                     const CrossEntropyOptions& options)
      : hidden_(hidden),
        weight_(weight),
        targets_(targets.data<int32_t>()),
        options_(options),
        plan_(hidden.size(0), weight.size(0), options.workspace_bytes),
        pitch_(pitch_of(plan_.chunk)),
        logits_({plan_.block, pitch_}, DType::kFloat32),
        state_(plan_.block) {
    for (int64_t n = 0; n < hidden.size(0); ++n) {
      MUSTER_CHECK(
          targets_[n] == options.ignore_index || (targets_[n] >= 0 && targets_[n] < weight.size(0)),
          "target " + std::to_string(targets_[n]) + " of token " + std::to_string(n));
    }
  }

  // Gradients are left out when undefined.
  void run(double* loss_sum, const TensorView& grad_hidden, const TensorView& grad_weight) {
    const bool train = grad_hidden.defined();
    const int64_t vocabulary = weight_.size(0);
    const bool whole = plan_.chunk == vocabulary;
    if (train && hidden_.size(0) == 0) add_weight_gradient(0, 0, 0, vocabulary, grad_weight);
    for (int64_t begin = 0; begin < hidden_.size(0); begin += plan_.block) {
      const int64_t count = std::min(plan_.block, hidden_.size(0) - begin);
      std::fill_n(state_.begin(), count, RowState{});
      for (int64_t first = 0; first < vocabulary; first += plan_.chunk) {
        const int64_t columns = std::min(plan_.chunk, vocabulary - first);
        const TensorView grad = whole && train ? grad_hidden : TensorView();
        for_rows(count, [&](int64_t row, int64_t rows) {
          take_product(begin, row, rows, first, columns);
          softmax_rows(logits(row), pitch_, rows, columns, first, targets_ + begin + row,
                       state_.data() + row);
          if (grad.defined()) {
            take_gradient(begin, row, rows, first, columns, grad);
          }
        });
        if (grad.defined()) add_weight_gradient(begin, count, first, columns, grad_weight);
      }
      add_loss(begin, count, loss_sum);
      for (int64_t first = 0; train && !whole && first < vocabulary; first += plan_.chunk) {
        const int64_t columns = std::min(plan_.chunk, vocabulary - first);
        for_rows(count, [&](int64_t row, int64_t rows) {
          take_product(begin, row, rows, first, columns);
          take_gradient(begin, row, rows, first, columns, grad_hidden);
        });
        add_weight_gradient(begin, count, first, columns, grad_weight);
      }
    }
  }

 private:
  float* logits(int64_t row) const { return logits_.data<float>() + row * pitch_; }

  // Calls f(row, rows) for pieces of a block's rows, on this thread's team.
  template <typename F>
  static void for_rows(int64_t count, F f) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < count; row += kRows) f(row, std::min(kRows, count - row));
  }

  // Logits of the block's rows [row, row + rows) for the vocabulary's [first, first + columns).
  void take_product(int64_t begin, int64_t row, int64_t rows, int64_t first, int64_t columns) {
    gemm_rows({.m = rows,
               .n = columns,
               .k = hidden_.size(1),
               .a = hidden_.data<float>() + (begin + row) * hidden_.stride(0),
               .lda = hidden_.stride(0),
               .b = weight_.data<float>() + first * weight_.stride(0),
               .ldb = weight_.stride(0),
               .transpose_b = true,
               .c = logits(row),
               .ldc = pitch_},
              0, rows);
  }

  // Logits (or, with one chunk, what softmax_rows left) to their gradient, and its product with the
  // weights into grad_hidden.
  void take_gradient(int64_t begin, int64_t row, int64_t rows, int64_t first, int64_t columns,
                     const TensorView& grad_hidden) {
    gradient_rows(logits(row), pitch_, rows, columns, first, targets_ + begin + row,
                  state_.data() + row, options_.ignore_index, plan_.chunk != weight_.size(0));
    gemm_rows({.m = rows,
               .n = hidden_.size(1),
               .k = columns,
               .a = logits(row),
               .lda = pitch_,
               .b = weight_.data<float>() + first * weight_.stride(0),
               .ldb = weight_.stride(0),
               .c = grad_hidden.data<float>() + (begin + row) * grad_hidden.stride(0),
               .ldc = grad_hidden.stride(0),
               .beta = first == 0 ? 0.0f : 1.0f},
              0, rows);
  }

  void add_weight_gradient(int64_t begin, int64_t count, int64_t first, int64_t columns,
                           const TensorView& grad_weight) {
    gemm_parallel({.m = columns,
                   .n = hidden_.size(1),
                   .k = count,
                   .a = logits(0),
                   .lda = pitch_,
                   .transpose_a = true,
                   .b = hidden_.data<float>() + begin * hidden_.stride(0),
                   .ldb = hidden_.stride(0),
                   .c = grad_weight.data<float>() + first * grad_weight.stride(0),
                   .ldc = grad_weight.stride(0),
                   .beta = begin == 0 && !options_.accumulate_weight ? 0.0f : 1.0f});
  }

  void add_loss(int64_t begin, int64_t count, double* loss_sum) const {
    for (int64_t r = 0; r < count; ++r) {
      if (targets_[begin + r] == options_.ignore_index) continue;
      const RowState& row = state_[r];
      *loss_sum += (static_cast<double>(row.max) - row.target) + std::log(double{row.sum});
    }
  }

  const ConstTensorView hidden_;
  const ConstTensorView weight_;
  const int32_t* const targets_;
  const CrossEntropyOptions options_;
  const Plan plan_;
  const int64_t pitch_;
  const Tensor logits_;
  std::vector<RowState> state_;
};

}  // namespace

void linear_cross_entropy_forward(const Stream&, TensorView loss_sum, ConstTensorView hidden,
                                  ConstTensorView weight, ConstTensorView targets,
                                  const CrossEntropyOptions& options) {
  LinearCrossEntropy(hidden, weight, targets, options).run(loss_sum.data<double>(), {}, {});
}

void linear_cross_entropy_train(const Stream&, TensorView loss_sum, TensorView grad_hidden,
                                TensorView grad_weight, ConstTensorView hidden,
                                ConstTensorView weight, ConstTensorView targets,
                                const CrossEntropyOptions& options) {
  LinearCrossEntropy(hidden, weight, targets, options)
      .run(loss_sum.data<double>(), grad_hidden, grad_weight);
}

}  // namespace muster::cpu
