#include "common/tensor.h"

#include <fmt/ranges.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>

namespace muster {

size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kFloat64:
      return 8;
    case DType::kInt32:
      return 4;
    case DType::kInt64:
      return 8;
    case DType::kUInt8:
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
      return 1;
  }
  MUSTER_CHECK(false, "bad dtype");
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kFloat64:
      return "float64";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kUInt8:
      return "uint8";
    case DType::kFloat8E4M3:
      return "float8_e4m3";
    case DType::kFloat8E5M2:
      return "float8_e5m2";
  }
  MUSTER_CHECK(false, "bad dtype");
}

Shape::Shape(std::initializer_list<int64_t> sizes) : Shape(std::vector<int64_t>(sizes)) {}

Shape::Shape(const std::vector<int64_t>& sizes) : rank(static_cast<int>(sizes.size())) {
  MUSTER_CHECK(sizes.size() <= kMaxDims);
  std::copy(sizes.begin(), sizes.end(), dims.begin());
}

int64_t Shape::numel() const {
  int64_t n = 1;
  for (int i = 0; i < rank; ++i) n *= dims[i];
  return n;
}

bool Shape::operator==(const Shape& other) const {
  return rank == other.rank && std::equal(dims.begin(), dims.begin() + rank, other.dims.begin());
}

std::string Shape::to_string() const {
  return fmt::format("[{}]", fmt::join(dims.begin(), dims.begin() + rank, ", "));
}

struct HostAllocator::Pool {
  std::mutex mutex;
  std::multimap<size_t, void*> idle;
  size_t in_use = 0;
  size_t peak = 0;

  ~Pool() {
    for (auto& [size, block] : idle) std::free(block);
  }
};

HostAllocator::HostAllocator() : pool_(std::make_shared<Pool>()) {}
HostAllocator::~HostAllocator() = default;

std::shared_ptr<void> HostAllocator::allocate(size_t bytes) {
  constexpr size_t kAlignment = 64;
  const size_t size = (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  void* block = nullptr;
  {
    std::lock_guard lock(pool_->mutex);
    if (auto it = pool_->idle.find(size); it != pool_->idle.end()) {
      block = it->second;
      pool_->idle.erase(it);
    }
  }
  if (block == nullptr) block = std::aligned_alloc(kAlignment, size);
  if (block == nullptr) throw std::bad_alloc();
  {
    std::lock_guard lock(pool_->mutex);
    pool_->in_use += size;
    pool_->peak = std::max(pool_->peak, pool_->in_use);
  }
  // The pool outlives its allocator for as long as a block is out.
  return std::shared_ptr<void>(block, [pool = pool_, size](void* p) {
    std::lock_guard lock(pool->mutex);
    pool->in_use -= size;
    pool->idle.emplace(size, p);
  });
}

size_t HostAllocator::bytes_in_use() const {
  std::lock_guard lock(pool_->mutex);
  return pool_->in_use;
}

size_t HostAllocator::peak_bytes() const {
  std::lock_guard lock(pool_->mutex);
  return pool_->peak;
}

HostAllocator& host_allocator() {
  static HostAllocator allocator;
  return allocator;
}

Tensor::Tensor(Shape shape, DType dtype, Allocator& allocator)
    : memory_(allocator.allocate(static_cast<size_t>(shape.numel()) * size_of(dtype))),
      view_(memory_.get(), dtype, shape, allocator.device()) {}

Tensor Tensor::zeros(Shape shape, DType dtype, Allocator& allocator) {
  MUSTER_CHECK(allocator.device().is_cpu());
  Tensor tensor(shape, dtype, allocator);
  std::memset(tensor.view().raw(), 0, tensor.bytes());
  return tensor;
}

}  // namespace muster
