#include "kernels/cuda/gpu.h"

#include <gmock/gmock.h>

#include "kernels/cuda/gpu_testing.h"

namespace muster {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;
using GpuGpuTest = testing::GpuTest;

TEST_F(GpuGpuTest, EveryGpuIsDescribed) {
  const std::vector<GpuInfo> gpus = list_gpus();
  ASSERT_EQ(gpus.size(), static_cast<size_t>(cuda::device_count()));
  for (const GpuInfo& gpu : gpus) {
    EXPECT_NE(gpu.name, "");
    EXPECT_THAT(gpu.uuid, StartsWith("GPU-"));
    EXPECT_GE(gpu.major, 3);
    EXPECT_GT(gpu.memory_bytes, 0);
  }
  const NvmlReport report = ask_nvml();
  ASSERT_FALSE(report.gpus.empty()) << report.problem;
  EXPECT_NE(report.driver, "");
  EXPECT_GT(gpus[0].free_bytes, 0)
      << "the two do not name it alike: " << gpus[0].uuid << " and " << report.gpus[0].uuid;
}

TEST_F(GpuGpuTest, TheFirstWorks) {
  const GpuProbe probe = probe_gpu(0);
  EXPECT_EQ(probe.problem, GpuProblem::kNone) << explain_gpu(probe, 0, 0);
  EXPECT_NO_THROW(check_gpu(0));
}

TEST_F(GpuGpuTest, OneTooManyAndOneTooSmall) {
  const int count = cuda::device_count();
  try {
    check_gpu(count);
    FAIL() << "GPU " << count << " was taken";
  } catch (const GpuError& e) {
    EXPECT_EQ(e.problem(), GpuProblem::kNoSuchGpu);
  }
  try {
    check_gpu(0, int64_t{1} << 50);
    FAIL() << "a petabyte was found";
  } catch (const GpuError& e) {
    EXPECT_EQ(e.problem(), GpuProblem::kFull);
    EXPECT_THAT(e.what(), HasSubstr("1048576.0 GiB are needed"));
  }
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace muster
