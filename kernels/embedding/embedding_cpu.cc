#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "kernels/blocks.h"
#include "kernels/embedding/embedding.h"

namespace muster::cpu {

void embedding_forward(const Stream&, TensorView out, ConstTensorView weight, ConstTensorView ids) {
  const int64_t n = out.size(0);
  const int64_t d = out.size(1);
  const int64_t vocab = weight.size(0);
  float* to = out.data<float>();
  const float* table = weight.data<float>();
  const int32_t* id = ids.data<int32_t>();
#pragma omp parallel for schedule(static) if (n * d >= kParallelElements)
  for (int64_t i = 0; i < n; ++i) {
    MUSTER_CHECK(id[i] >= 0 && id[i] < vocab, std::to_string(id[i]));
    std::memcpy(to + i * d, table + id[i] * d, d * sizeof(float));
  }
}

void embedding_order(const Stream&, TensorView order, ConstTensorView ids, int64_t vocab) {
  const int64_t n = ids.size(0);
  const int32_t* id = ids.data<int32_t>();
  std::vector<int32_t> tokens(n);
  std::iota(tokens.begin(), tokens.end(), 0);
  std::stable_sort(tokens.begin(), tokens.end(),
                   [id](int32_t a, int32_t b) { return id[a] < id[b]; });
  int32_t* to = order.data<int32_t>();
  for (int64_t i = 0; i < n; ++i) {
    MUSTER_CHECK(id[i] >= 0 && id[i] < vocab, std::to_string(id[i]));
    to[2 * i] = tokens[i];
    to[2 * i + 1] = id[tokens[i]];
  }
}

// Adds in order of n, for which no other order is needed.
void embedding_backward(const Stream&, TensorView grad_weight, ConstTensorView grad_out,
                        ConstTensorView ids, ConstTensorView) {
  const int64_t n = grad_out.size(0);
  const int64_t d = grad_out.size(1);
  const int64_t vocab = grad_weight.size(0);
  float* table = grad_weight.data<float>();
  const float* from = grad_out.data<float>();
  const int32_t* id = ids.data<int32_t>();
  for (int64_t i = 0; i < n; ++i) {
    MUSTER_CHECK(id[i] >= 0 && id[i] < vocab, std::to_string(id[i]));
  }
  // Threads share the columns, not the tokens: each adds its columns in order of n, and two tokens
  // with the same id never race. Whole cache lines of columns, so that threads do not share those.
  constexpr int64_t kColumns = 64;
  const int64_t groups = (d + kColumns - 1) / kColumns;
#pragma omp parallel for schedule(static) if (n * d >= kParallelElements)
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t begin = group * kColumns;
    const int64_t end = std::min(d, begin + kColumns);
    for (int64_t i = 0; i < n; ++i) {
      float* sum = table + id[i] * d;
      const float* row = from + i * d;
#pragma omp simd
      for (int64_t j = begin; j < end; ++j) sum[j] += row[j];
    }
  }
}

}  // namespace muster::cpu
