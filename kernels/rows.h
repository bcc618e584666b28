// Views of one to three dimensions as a list of rows (all dimensions but the last), whatever the
// outer strides.
#pragma once

#include "common/tensor.h"

namespace muster {

// A [rows, size] matrix of float32 with any two outer strides and innermost stride 1.
template <typename T>
class Rows {
 public:
  template <typename Void>
  explicit Rows(const BasicTensorView<Void>& view)
      : data_(view.template data<float>()),
        inner_(view.rank() == 3 ? std::max<int64_t>(view.size(1), 1) : 1),
        outer_stride_(view.stride(0)),
        inner_stride_(view.rank() == 3 ? view.stride(1) : 0) {}
  T* operator[](int64_t row) const {
    return data_ + row / inner_ * outer_stride_ + row % inner_ * inner_stride_;
  }

 private:
  T* data_;
  int64_t inner_;
  int64_t outer_stride_;
  int64_t inner_stride_;
};
Rows(const TensorView&)->Rows<float>;
Rows(const ConstTensorView&)->Rows<const float>;

// True if elements of a row lie next to each other.
template <typename Void>
bool rows_are_dense(const BasicTensorView<Void>& view) {
  return view.size(view.rank() - 1) <= 1 || view.stride(view.rank() - 1) == 1;
}

}  // namespace muster
