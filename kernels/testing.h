// Helpers of the kernels' tests. The pattern of a test:
//
//   1. Write the op once, slow and obvious, as a template over its arithmetic type. Run as double
//   it
//      is the reference, run as float it is the naive version whose error sets the tolerance.
//   2. Make inputs with random_tensor, outputs with poisoned (all NaN) or, where strides are free,
//      with Strided, whose gaps must still be poison after the call.
//   3. expect_close(output, reference, naive); gradients also against finite_difference of the
//      double reference.
//   4. Run again under ThreadCount(1) and ThreadCount(3): expect_same_bits.
//
// How an op is laid out: NAME.cc declares `namespace muster::cpu { same signature }` at its top,
// checks, and dispatches (dispatch.h); NAME_cpu.cc defines it.
#pragma once

#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "common/rng.h"
#include "common/tensor.h"

namespace muster::testing {

constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

// Calls f(offset in elements) for every element of the view, row-major.
template <typename Void, typename F>
void for_each_element(const BasicTensorView<Void>& view, F f) {
  std::array<int64_t, kMaxDims> size{1, 1, 1, 1};
  std::array<int64_t, kMaxDims> stride{0, 0, 0, 0};
  for (int i = 0; i < view.rank(); ++i) {
    size[kMaxDims - view.rank() + i] = view.size(i);
    stride[kMaxDims - view.rank() + i] = view.stride(i);
  }
  for (int64_t a = 0; a < size[0]; ++a) {
    for (int64_t b = 0; b < size[1]; ++b) {
      for (int64_t c = 0; c < size[2]; ++c) {
        for (int64_t d = 0; d < size[3]; ++d) {
          f(a * stride[0] + b * stride[1] + c * stride[2] + d * stride[3]);
        }
      }
    }
  }
}

// The elements of a float32 view, row-major, as T.
template <typename T>
std::vector<T> to_vector(const ConstTensorView& view) {
  std::vector<T> values;
  values.reserve(view.numel());
  const float* data = view.data<float>();
  for_each_element(view, [&](int64_t at) { values.push_back(static_cast<T>(data[at])); });
  return values;
}

// Writes row-major values into a float32 view.
template <typename T>
void assign(const TensorView& view, const std::vector<T>& values) {
  ASSERT_EQ(view.numel(), static_cast<int64_t>(values.size()));
  float* data = view.data<float>();
  size_t i = 0;
  for_each_element(view, [&](int64_t at) { data[at] = static_cast<float>(values[i++]); });
}

// Fills a float32 view with normal numbers that depend on the seed only.
inline void fill_random(const TensorView& view, uint64_t seed, double scale = 1.0,
                        double mean = 0.0) {
  const CounterRng rng(seed, RandomPurpose::kInit, 0);
  float* data = view.data<float>();
  uint64_t i = 0;
  for_each_element(
      view, [&](int64_t at) { data[at] = static_cast<float>(mean + scale * rng.normal(i++)); });
}

inline Tensor random_tensor(Shape shape, uint64_t seed, double scale = 1.0, double mean = 0.0) {
  Tensor tensor(shape, DType::kFloat32);
  fill_random(tensor, seed, scale, mean);
  return tensor;
}

// Int32 values in [begin, end).
inline Tensor random_ints(Shape shape, uint64_t seed, int32_t begin, int32_t end) {
  const CounterRng rng(seed, RandomPurpose::kInit, 1);
  Tensor tensor(shape, DType::kInt32);
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    tensor.data<int32_t>()[i] = begin + static_cast<int32_t>(rng.bits(i) % (end - begin));
  }
  return tensor;
}

inline Tensor int_tensor(const std::vector<int32_t>& values) {
  Tensor tensor({static_cast<int64_t>(values.size())}, DType::kInt32);
  std::copy(values.begin(), values.end(), tensor.data<int32_t>());
  return tensor;
}

// A float32 tensor of NaNs: what a kernel forgets to write, or reads before writing, shows.
inline Tensor poisoned(Shape shape) {
  Tensor tensor(shape, DType::kFloat32);
  std::fill_n(tensor.data<float>(), tensor.numel(), kPoison);
  return tensor;
}

// A poisoned float32 buffer [rows, row_stride] and a view into its middle: shape [rows, inner...]
// where `inner` is contiguous and starts `offset` elements into each row.
class Strided {
 public:
  Strided(Shape shape, int64_t offset, int64_t row_stride) {
    int64_t inner = 1;
    std::array<int64_t, kMaxDims> stride{};
    for (int i = shape.rank - 1; i > 0; --i) {
      stride[i] = inner;
      inner *= shape[i];
    }
    stride[0] = row_stride;
    EXPECT_LE(offset + inner, row_stride);
    buffer_ = poisoned({std::max<int64_t>(shape[0], 1) * row_stride});
    view_ = TensorView(buffer_.data<float>() + offset, DType::kFloat32, shape, stride);
  }
  TensorView view() const { return view_; }
  operator TensorView() const { return view_; }
  operator ConstTensorView() const { return view_; }

  // Everything outside the view is as it was made.
  void expect_gaps_untouched() const {
    std::vector<bool> inside(buffer_.numel(), false);
    const int64_t base = view_.data<float>() - buffer_.data<float>();
    for_each_element(view_, [&](int64_t at) { inside[base + at] = true; });
    for (int64_t i = 0; i < buffer_.numel(); ++i) {
      if (!inside[i]) {
        ASSERT_TRUE(std::isnan(buffer_.data<float>()[i])) << "gap element " << i;
      }
    }
  }

 private:
  Tensor buffer_;
  TensorView view_;
};

// max |a − b|; NaN anywhere gives infinity, equal infinities count as equal.
template <typename A, typename B>
double max_error(const std::vector<A>& a, const std::vector<B>& b) {
  double worst = a.size() == b.size() ? 0.0 : std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
    const double x = a[i];
    const double y = b[i];
    if (x == y) continue;
    const double error = std::abs(x - y);
    worst = std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(worst, error);
  }
  return worst;
}

// The tolerance rule: got may err from the float64 reference by `multiple` times the error of the
// naive float32 version of the same formula, or by a few units in the last place of the largest
// value where the naive version happens to be exact.
inline void expect_close(const std::vector<float>& got, const std::vector<double>& want,
                         const std::vector<float>& naive, double multiple = 4.0) {
  ASSERT_EQ(got.size(), want.size());
  double largest = 0.0;
  for (const double x : want) {
    if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
  }
  const double floor = 4 * std::numeric_limits<float>::epsilon() * largest;
  const double allowed = std::max(multiple * max_error(naive, want), floor);
  ASSERT_TRUE(std::isfinite(allowed)) << "the naive version is broken";
  const double error = max_error(got, want);
  if (error <= allowed) return;
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] != want[i] && !(std::abs(got[i] - want[i]) <= allowed)) {
      FAIL() << "element " << i << ": got " << got[i] << ", want " << want[i] << "; worst error "
             << error << ", allowed " << allowed;
    }
  }
}
inline void expect_close(const ConstTensorView& got, const std::vector<double>& want,
                         const std::vector<float>& naive, double multiple = 4.0) {
  expect_close(to_vector<float>(got), want, naive, multiple);
}

// d f / d x[i] for every i, by central differences. f is evaluated in double, so that with the
// default step the result is good to about 1e-8 of f's scale.
inline std::vector<double> finite_difference(
    const std::function<double(const std::vector<double>&)>& f, std::vector<double> x,
    double step = 1e-5) {
  std::vector<double> gradient(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double at = x[i];
    x[i] = at + step;
    const double above = f(x);
    x[i] = at - step;
    const double below = f(x);
    x[i] = at;
    gradient[i] = (above - below) / (2 * step);
  }
  return gradient;
}

// Σ a·b: turns an op's output into a scalar loss whose output gradient is b.
template <typename T>
T dot(const std::vector<T>& a, const std::vector<T>& b) {
  T sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// A gradient against finite differences: they agree to `relative` of the largest element.
inline void expect_gradient(const ConstTensorView& got, const std::vector<double>& differences,
                            double relative = 2e-5) {
  double largest = 1e-30;
  for (const double x : differences) largest = std::max(largest, std::abs(x));
  EXPECT_LE(max_error(to_vector<float>(got), differences), relative * largest);
}

inline void expect_same_bits(const ConstTensorView& a, const ConstTensorView& b) {
  const std::vector<float> x = to_vector<float>(a);
  const std::vector<float> y = to_vector<float>(b);
  ASSERT_EQ(x.size(), y.size());
  for (size_t i = 0; i < x.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(x[i]), std::bit_cast<uint32_t>(y[i]))
        << "element " << i << ": " << x[i] << " and " << y[i];
  }
}

// OpenMP threads of this thread's parallel regions until the end of the scope.
class ThreadCount {
 public:
  explicit ThreadCount(int threads) : before_(omp_get_max_threads()) {
    omp_set_num_threads(threads);
  }
  ~ThreadCount() { omp_set_num_threads(before_); }
  ThreadCount(const ThreadCount&) = delete;
  ThreadCount& operator=(const ThreadCount&) = delete;

 private:
  int before_;
};

}  // namespace muster::testing
