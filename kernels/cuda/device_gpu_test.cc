#include <gmock/gmock.h>

#include "kernels/cuda/device.h"
#include "kernels/cuda/gpu_testing.h"

namespace muster {
namespace {

using namespace testing;
using DeviceGpuTest = GpuTest;

TEST_F(DeviceGpuTest, AllocatorReusesBlocksAndCounts) {
  cuda::DeviceAllocator allocator(0);
  const void* first = nullptr;
  {
    const auto block = allocator.allocate(1000);
    first = block.get();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % 256, 0u);
    EXPECT_EQ(allocator.bytes_in_use(), 1024u);
  }
  EXPECT_EQ(allocator.bytes_in_use(), 0u);
  EXPECT_EQ(allocator.allocate(1000).get(), first);
  EXPECT_EQ(allocator.peak_bytes(), 1024u);
}

TEST_F(DeviceGpuTest, AFullDeviceSaysHowMuchWasWantedAndLeavesNoErrorBehind) {
  cuda::DeviceAllocator allocator(0);
  try {
    allocator.allocate(size_t{1} << 50);
    FAIL() << "a petabyte was allocated";
  } catch (const cuda::CudaError& error) {
    EXPECT_TRUE(error.out_of_memory());
    EXPECT_THAT(error.what(), ::testing::HasSubstr("1125899906842624 bytes wanted"));
  }
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_NE(allocator.allocate(1).get(), nullptr);
}

TEST_F(DeviceGpuTest, ErrorsNameTheCallAndItsPlace) {
  try {
    CUDA_CHECK(cudaSetDevice(1000));
    FAIL() << "there is no device 1000";
  } catch (const cuda::CudaError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("device_gpu_test.cc"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("cudaSetDevice(1000)"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("cudaErrorInvalidDevice"));
  }
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(DeviceGpuTest, WorkspaceGrowsAndIsKeptForEachUse) {
  void* small = cuda::workspace(gpu_stream(), cuda::Scratch::kOp, 1 << 10);
  EXPECT_EQ(cuda::workspace(gpu_stream(), cuda::Scratch::kOp, 1 << 9), small);
  void* large = cuda::workspace(gpu_stream(), cuda::Scratch::kOp, 64 << 20);
  EXPECT_EQ(cuda::workspace(gpu_stream(), cuda::Scratch::kOp, 1 << 10), large);
  EXPECT_NE(cuda::workspace(gpu_stream(), cuda::Scratch::kMatmul, 1 << 10), large);
}

}  // namespace
}  // namespace muster
