#include "common/tensor.h"

#include <gtest/gtest.h>

#include <numeric>
#include <thread>

namespace muster {
namespace {

TEST(TensorTest, SizesAndNames) {
  EXPECT_EQ(size_of(DType::kBFloat16), 2u);
  EXPECT_EQ(size_of(DType::kFloat64), 8u);
  EXPECT_STREQ(name_of(DType::kFloat32), "float32");
  EXPECT_STREQ(name_of(DType::kUInt8), "uint8");
}

TEST(TensorTest, Shapes) {
  const Shape shape{2, 3, 4};
  EXPECT_EQ(shape.numel(), 24);
  EXPECT_EQ(shape.to_string(), "[2, 3, 4]");
  EXPECT_EQ(shape, Shape(std::vector<int64_t>{2, 3, 4}));
  EXPECT_FALSE((shape == Shape{2, 3}));
  EXPECT_EQ((Shape{0, 5}).numel(), 0);
}

TEST(TensorTest, ViewsOfViews) {
  std::vector<float> memory(24);
  std::iota(memory.begin(), memory.end(), 0.0F);
  const TensorView view(memory.data(), DType::kFloat32, {4, 6});
  EXPECT_EQ(view.stride(0), 6);
  EXPECT_EQ(view.stride(1), 1);
  EXPECT_EQ(view.bytes(), 96u);
  EXPECT_TRUE(view.contiguous());

  const TensorView rows = view.slice(1, 3);
  EXPECT_EQ(rows.shape(), (Shape{2, 6}));
  EXPECT_EQ(rows.data<float>()[0], 6.0F);
  EXPECT_TRUE(rows.contiguous());

  const TensorView columns = view.narrow(1, 2, 5);
  EXPECT_EQ(columns.shape(), (Shape{4, 3}));
  EXPECT_EQ(columns.data<float>()[columns.stride(0)], 8.0F);
  EXPECT_FALSE(columns.contiguous());
  EXPECT_EQ(view.narrow(1, 6, 6).numel(), 0);  // an empty tail

  EXPECT_EQ(view.reshape({2, 12}).stride(0), 12);
  const ConstTensorView constant = columns;
  EXPECT_EQ(constant.data<float>(), columns.data<float>());
  EXPECT_EQ(constant.stride(0), 6);
}

TEST(TensorTest, OwningTensorsShareTheirMemory) {
  HostAllocator allocator;
  Tensor copy;
  EXPECT_FALSE(copy.defined());
  {
    const Tensor tensor = Tensor::zeros({3, 5}, DType::kFloat32, allocator);
    EXPECT_EQ(std::accumulate(tensor.data<float>(), tensor.data<float>() + 15, 0.0F), 0.0F);
    tensor.data<float>()[14] = 2.0F;
    copy = tensor;
  }
  EXPECT_EQ(copy.data<float>()[14], 2.0F);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(copy.data<float>()) % 64, 0u);
  EXPECT_EQ(allocator.bytes_in_use(), 64u);
}

TEST(TensorTest, AllocatorReusesBlocksAndCounts) {
  HostAllocator allocator;
  void* first = nullptr;
  {
    const auto block = allocator.allocate(1000);
    const auto other = allocator.allocate(1);
    first = block.get();
    EXPECT_EQ(allocator.bytes_in_use(), 1024u + 64u);
  }
  EXPECT_EQ(allocator.bytes_in_use(), 0u);
  EXPECT_EQ(allocator.peak_bytes(), 1088u);
  EXPECT_EQ(allocator.allocate(1020).get(), first);  // the same size class
}

TEST(TensorTest, BlocksOutliveTheirAllocator) {
  std::shared_ptr<void> block;
  {
    HostAllocator allocator;
    block = allocator.allocate(100);
  }
  static_cast<char*>(block.get())[99] = 1;  // the address sanitizer would object
}

TEST(TensorTest, AllocatorIsThreadSafe) {
  HostAllocator allocator;
  const auto churn = [&] {
    for (int i = 0; i < 1000; ++i) {
      const auto block = allocator.allocate(64 * (i % 7 + 1));
      *static_cast<int*>(block.get()) = i;
    }
  };
  std::thread one(churn), two(churn);
  one.join();
  two.join();
  EXPECT_EQ(allocator.bytes_in_use(), 0u);
}

TEST(TensorDeathTest, ChecksMisuse) {
  float memory[6] = {};
  const TensorView view(memory, DType::kFloat32, {2, 3});
  EXPECT_DEATH(view.data<double>(), "CHECK failed.*float32");
  EXPECT_DEATH(view.slice(1, 3), "CHECK failed");
  EXPECT_DEATH(view.narrow(1, 0, 2).reshape({4}), "CHECK failed");
}

}  // namespace
}  // namespace muster
