// Rotary position embedding (Su et al., 2021), Hugging Face's convention: the two halves of a head
// are a pair's two parts (element i turns with element i + D/2), not neighbours as in Meta's
// original weights.
#pragma once

#include <string>

#include "common/tensor.h"

namespace muster {

struct RopeOptions {
  double theta = 10000.0;
  // none: angle(p, i) = p · theta^(−2i/D).
  // linear: positions divided by `factor`.
  // llama3: wavelengths above original_positions / low_freq_factor are stretched by `factor`, those
  // below original_positions / high_freq_factor kept, and between them interpolated (Llama 3.1's
  // rule).
  std::string scaling = "none";
  double factor = 1.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  int64_t original_positions = 8192;
};

// table [positions, 2, D/2] float32: cos of every angle, then sin. Computed in double on the host;
// the table lies in host memory.
void rope_table(TensorView table, const RopeOptions& options);

// Turns x [N, H, D] in place by the angles of positions[n]: (a, b) → (a·cos − b·sin, b·cos + a·sin)
// for a = x[i], b = x[i + D/2]. `inverse` turns back, which is the gradient. x may be a strided
// view (the q or k part of a QKV buffer; innermost stride 1); positions [N] int32, each below the
// table's rows; table on x's device.
void rope_apply(const Stream& stream, TensorView x, ConstTensorView table,
                ConstTensorView positions, bool inverse);

}  // namespace muster
