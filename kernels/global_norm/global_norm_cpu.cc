#include <vector>

#include "kernels/blocks.h"
#include "kernels/global_norm/global_norm.h"

namespace muster::cpu {

void sum_of_squares(const Stream&, TensorView sum, ConstTensorView x) {
  const float* data = x.data<float>();
  const int64_t n = x.numel();
  std::vector<double> partial((n + kBlockElements - 1) / kBlockElements);
  // Squares of float32 are exact in double and cannot overflow there: a huge gradient gives a huge
  // norm, not infinity.
  for_blocks(n, [&](int64_t begin, int64_t end) {
    constexpr int kLanes = 16;
    double lanes[kLanes] = {};
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
#pragma omp simd
      for (int lane = 0; lane < kLanes; ++lane) {
        lanes[lane] += static_cast<double>(data[i + lane]) * data[i + lane];
      }
    }
    for (; i < end; ++i) lanes[i % kLanes] += static_cast<double>(data[i]) * data[i];
    double total = 0.0;
    for (const double lane : lanes) total += lane;
    partial[begin / kBlockElements] = total;
  });
  double total = 0.0;
  for (const double block : partial) total += block;
  *sum.data<double>() += total;
}

}  // namespace muster::cpu
