// Tensors: a non-owning strided view (what kernels take) and an owning contiguous buffer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "common/check.h"

namespace muster {

enum class DType : uint8_t {
  kFloat32,
  kBFloat16,
  kFloat16,
  kFloat64,
  kInt32,
  kInt64,
  kUInt8,
  kFloat8E4M3,
  kFloat8E5M2
};

// Bytes of one element.
size_t size_of(DType dtype);
// "float32", "bfloat16", …; also the names used in configs and manifests.
const char* name_of(DType dtype);

template <typename T>
constexpr DType dtype_of();
template <>
constexpr DType dtype_of<float>() {
  return DType::kFloat32;
}
template <>
constexpr DType dtype_of<double>() {
  return DType::kFloat64;
}
template <>
constexpr DType dtype_of<int32_t>() {
  return DType::kInt32;
}
template <>
constexpr DType dtype_of<int64_t>() {
  return DType::kInt64;
}
template <>
constexpr DType dtype_of<uint8_t>() {
  return DType::kUInt8;
}

// Where memory lies. CPU memory has index 0; a CUDA device has its ordinal. On the plan device
// there is neither memory nor arithmetic: addresses are made up, kernels check their arguments and
// return. A step run there shows what memory it needs.
struct Device {
  enum class Type : uint8_t { kCpu, kCuda, kPlan };
  Type type = Type::kCpu;
  int index = 0;
  static Device cpu() { return {}; }
  static Device cuda(int index) { return {Type::kCuda, index}; }
  static Device plan() { return {Type::kPlan, 0}; }
  bool is_cpu() const { return type == Type::kCpu; }
  bool is_cuda() const { return type == Type::kCuda; }
  bool is_plan() const { return type == Type::kPlan; }
  bool operator==(const Device&) const = default;
};

// The queue that a kernel's work is put on. On the CPU `handle` is null and a kernel has completed
// when its call returns; on CUDA `handle` is the cudaStream_t and the call only enqueues.
struct Stream {
  Device device;
  void* handle = nullptr;
  static Stream cpu() { return {}; }
};

constexpr int kMaxDims = 4;

// Sizes of up to four dimensions, outermost first. A scalar has one dimension of size 1.
struct Shape {
  std::array<int64_t, kMaxDims> dims{};
  int rank = 0;

  Shape() = default;
  Shape(std::initializer_list<int64_t> sizes);
  explicit Shape(const std::vector<int64_t>& sizes);
  int64_t operator[](int i) const { return dims[i]; }
  int64_t numel() const;
  bool operator==(const Shape& other) const;
  std::string to_string() const;  // "[2, 3]"
};

// A view of memory that somebody else owns. Strides count elements, not bytes. Void is `void`
// (TensorView) or `const void` (ConstTensorView); a mutable view converts to a const one.
template <typename Void>
class BasicTensorView {
 public:
  BasicTensorView() = default;
  // A contiguous (row-major) view.
  BasicTensorView(Void* data, DType dtype, Shape shape, Device device = Device::cpu())
      : data_(data), dtype_(dtype), device_(device), shape_(shape) {
    int64_t step = 1;
    for (int i = shape.rank - 1; i >= 0; --i) {
      stride_[i] = step;
      step *= shape[i];
    }
  }
  BasicTensorView(Void* data, DType dtype, Shape shape, std::array<int64_t, kMaxDims> stride,
                  Device device = Device::cpu())
      : data_(data), dtype_(dtype), device_(device), shape_(shape), stride_(stride) {}
  operator BasicTensorView<const void>() const {
    return BasicTensorView<const void>(data_, dtype_, shape_, stride_, device_);
  }

  Void* raw() const { return data_; }
  bool defined() const { return data_ != nullptr; }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }
  const Shape& shape() const { return shape_; }
  int rank() const { return shape_.rank; }
  int64_t size(int i) const { return shape_[i]; }
  int64_t stride(int i) const { return stride_[i]; }
  int64_t numel() const { return shape_.numel(); }
  size_t bytes() const { return static_cast<size_t>(numel()) * size_of(dtype_); }
  bool contiguous() const {
    int64_t step = 1;
    for (int i = shape_.rank - 1; i >= 0; --i) {
      if (shape_[i] != 1 && stride_[i] != step) return false;
      step *= shape_[i];
    }
    return true;
  }

  // Typed pointer to the first element; checks the dtype. `data<float>()` on a const view is const
  // float*.
  template <typename T>
  auto data() const {
    using Pointer = std::conditional_t<std::is_const_v<Void>, const T, T>*;
    MUSTER_CHECK(dtype_ == dtype_of<T>(), name_of(dtype_));
    return static_cast<Pointer>(data_);
  }

  // Rows [begin, end) of the first dimension.
  BasicTensorView slice(int64_t begin, int64_t end) const { return narrow(0, begin, end); }
  // Elements [begin, end) of dimension `dim`; other dimensions and all strides stay.
  BasicTensorView narrow(int dim, int64_t begin, int64_t end) const {
    MUSTER_CHECK(dim < shape_.rank && begin >= 0 && begin <= end && end <= shape_[dim]);
    BasicTensorView view = *this;
    view.shape_.dims[dim] = end - begin;
    view.data_ = offset(begin * stride_[dim]);
    return view;
  }
  // The same elements under another shape. The view must be contiguous.
  BasicTensorView reshape(Shape shape) const {
    MUSTER_CHECK(contiguous() && shape.numel() == numel(), shape.to_string());
    return BasicTensorView(data_, dtype_, shape, device_);
  }

 private:
  Void* offset(int64_t elements) const {
    using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
    return static_cast<Byte*>(data_) + elements * static_cast<int64_t>(size_of(dtype_));
  }

  Void* data_ = nullptr;
  DType dtype_ = DType::kFloat32;
  Device device_;
  Shape shape_;
  std::array<int64_t, kMaxDims> stride_{};
};

using TensorView = BasicTensorView<void>;
using ConstTensorView = BasicTensorView<const void>;

// Source of memory for tensors; an arena, a cache or plain host memory. Blocks are 64-byte aligned
// and not cleared. The returned pointer gives the block back when its last owner drops it.
class Allocator {
 public:
  virtual ~Allocator() = default;
  virtual std::shared_ptr<void> allocate(size_t bytes) = 0;
  virtual Device device() const = 0;
};

// Host memory that keeps freed blocks for the next request of the same size, so that a training
// step allocates nothing after the first. Counts bytes in use and their peak. Thread-safe.
class HostAllocator : public Allocator {
 public:
  HostAllocator();
  ~HostAllocator() override;
  std::shared_ptr<void> allocate(size_t bytes) override;
  Device device() const override { return Device::cpu(); }
  size_t bytes_in_use() const;
  size_t peak_bytes() const;

 private:
  struct Pool;
  std::shared_ptr<Pool> pool_;
};

// The process-wide host allocator.
HostAllocator& host_allocator();

// An owning contiguous tensor. Copies share the memory.
class Tensor {
 public:
  Tensor() = default;
  Tensor(Shape shape, DType dtype, Allocator& allocator = host_allocator());
  // As above, filled with zero bytes (host memory only).
  static Tensor zeros(Shape shape, DType dtype, Allocator& allocator = host_allocator());

  bool defined() const { return memory_ != nullptr; }
  TensorView view() const { return view_; }
  operator TensorView() const { return view_; }
  operator ConstTensorView() const { return view_; }
  const Shape& shape() const { return view_.shape(); }
  DType dtype() const { return view_.dtype(); }
  int64_t numel() const { return view_.numel(); }
  size_t bytes() const { return view_.bytes(); }
  template <typename T>
  T* data() const {
    return view_.data<T>();
  }

 private:
  std::shared_ptr<void> memory_;
  TensorView view_;
};

}  // namespace muster
