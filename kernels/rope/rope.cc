#include "kernels/rope/rope.h"

#include <cmath>
#include <numbers>

#include "kernels/dispatch.h"
#include "kernels/rows.h"

namespace muster {

MUSTER_TWINS(void rope_apply(const Stream& stream, TensorView x, ConstTensorView table,
                             ConstTensorView positions, bool inverse);)

namespace {

// Angle per position of pair i, in radians.
double frequency(int64_t i, int64_t head_dim, const RopeOptions& options) {
  const double plain = std::pow(options.theta, -2.0 * i / head_dim);
  if (options.scaling == "none") return plain;
  if (options.scaling == "linear") return plain / options.factor;
  MUSTER_CHECK(options.scaling == "llama3", options.scaling);
  const double turns = options.original_positions * plain / (2.0 * std::numbers::pi);
  if (turns < options.low_freq_factor) return plain / options.factor;
  if (turns > options.high_freq_factor) return plain;
  const double smooth =
      (turns - options.low_freq_factor) / (options.high_freq_factor - options.low_freq_factor);
  return (1.0 - smooth) * plain / options.factor + smooth * plain;
}

}  // namespace

void rope_table(TensorView table, const RopeOptions& options) {
  MUSTER_CHECK(table.rank() == 3 && table.size(1) == 2, table.shape().to_string());
  MUSTER_CHECK(table.contiguous() && table.device().is_cpu());
  const int64_t positions = table.size(0);
  const int64_t half = table.size(2);
  float* data = table.data<float>();
  std::vector<double> angle(half);
  for (int64_t i = 0; i < half; ++i) angle[i] = frequency(i, 2 * half, options);
#pragma omp parallel for schedule(static) if (positions * half >= 4096)
  for (int64_t p = 0; p < positions; ++p) {
    float* row = data + p * 2 * half;
    for (int64_t i = 0; i < half; ++i) {
      row[i] = static_cast<float>(std::cos(p * angle[i]));
      row[half + i] = static_cast<float>(std::sin(p * angle[i]));
    }
  }
}

void rope_apply(const Stream& stream, TensorView x, ConstTensorView table,
                ConstTensorView positions, bool inverse) {
  MUSTER_CHECK(x.rank() == 3 && rows_are_dense(x), x.shape().to_string());
  MUSTER_CHECK(table.rank() == 3 && table.size(1) == 2 && 2 * table.size(2) == x.size(2),
               table.shape().to_string() + " for " + x.shape().to_string());
  MUSTER_CHECK(table.contiguous() && table.dtype() == DType::kFloat32, name_of(table.dtype()));
  MUSTER_CHECK(positions.rank() == 1 && positions.size(0) == x.size(0) && positions.contiguous(),
               positions.shape().to_string());
  MUSTER_CHECK(positions.dtype() == DType::kInt32, name_of(positions.dtype()));
  MUSTER_CHECK(x.device() == stream.device && table.device() == stream.device &&
               positions.device() == stream.device);
  MUSTER_DISPATCH(stream, rope_apply(stream, x, table, positions, inverse));
}

}  // namespace muster
