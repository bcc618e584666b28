#include "kernels/cuda/gpu.h"

#include <gmock/gmock.h>
#include <unistd.h>

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kGiB = int64_t{1} << 30;

GpuProbe h200(GpuProblem problem) {
  GpuProbe probe;
  probe.problem = problem;
  probe.count = 2;
  probe.gpu = {1, "NVIDIA H200", "GPU-1", 9, 0, 140 * kGiB, 3 * kGiB};
  return probe;
}

TEST(Gpu, NothingToSayOfOneThatWorks) {
  EXPECT_EQ(explain_gpu(h200(GpuProblem::kNone), 1, kGiB), "");
}

TEST(Gpu, AnIndexThatIsTooHighNamesThoseThereAre) {
  GpuProbe probe;
  probe.problem = GpuProblem::kNoSuchGpu;
  probe.count = 2;
  EXPECT_THAT(explain_gpu(probe, 5, 0),
              HasSubstr("GPU 5 does not exist: there are 2 GPUs, numbers 0 to 1"));
  probe.count = 1;
  EXPECT_THAT(explain_gpu(probe, 5, 0), HasSubstr("there is 1 GPU, number 0"));
}

TEST(Gpu, AnOldArchitectureIsNamed) {
  GpuProbe probe = h200(GpuProblem::kOldArchitecture);
  probe.gpu.name = "Tesla V100";
  probe.gpu.major = 7;
  EXPECT_EQ(explain_gpu(probe, 1, 0),
            "GPU 1 (Tesla V100) has compute capability 7.0; muster needs 8.0 (Ampere) or newer");
}

TEST(Gpu, AnArchitectureWithoutCodeSaysHowToBuildIt) {
  GpuProbe probe = h200(GpuProblem::kNoCode);
  probe.gpu.major = 12;
  EXPECT_THAT(explain_gpu(probe, 1, 0),
              AllOf(HasSubstr("12.0"), HasSubstr("CMAKE_CUDA_ARCHITECTURES=120")));
}

TEST(Gpu, AFullOneSaysHowMuchIsUsedAndByWhom) {
  GpuProbe probe = h200(GpuProblem::kFull);
  probe.others = {{4711, "python3", 130 * kGiB}, {4712, "", 0}};
  EXPECT_EQ(explain_gpu(probe, 1, 20 * kGiB),
            "GPU 1 (NVIDIA H200) has 3.0 GiB of 140.0 GiB free and 20.0 GiB are needed; 137.0 GiB "
            "are in use. It is used by 4711 (python3, 130.0 GiB), 4712.");
}

TEST(Gpu, ABusyOrBrokenOneIsToldInTheDriversWords) {
  GpuProbe probe = h200(GpuProblem::kBusy);
  probe.detail = "all devices are busy";
  EXPECT_THAT(explain_gpu(probe, 1, 0),
              AllOf(HasSubstr("held by another process"), HasSubstr("all devices are busy")));
  probe.problem = GpuProblem::kBroken;
  probe.detail = "uncorrectable ECC error encountered (cudaErrorECCUncorrectable)";
  EXPECT_THAT(explain_gpu(probe, 1, 0),
              AllOf(HasSubstr("does not work"), HasSubstr("cudaErrorECCUncorrectable")));
}

TEST(Gpu, WithoutDriverOrCudaTheReasonIsGiven) {
  if (!list_gpus().empty()) GTEST_SKIP() << "this machine has a GPU";
  try {
    check_gpu(0);
    FAIL() << "a GPU that is not there was taken";
  } catch (const GpuError& e) {
    EXPECT_THAT(e.problem(), ::testing::AnyOf(GpuProblem::kNotBuiltIn, GpuProblem::kNoDriver,
                                              GpuProblem::kNoGpu));
    EXPECT_THAT(e.what(), HasSubstr("GPU 0 cannot be used"));
  }
}

TEST(Gpu, PeaksByName) {
  EXPECT_EQ(gpu_peak_bf16("NVIDIA H200"), 989e12);
  EXPECT_EQ(gpu_peak_bf16("NVIDIA H100 80GB HBM3"), 989e12);
  EXPECT_EQ(gpu_peak_bf16("NVIDIA GH200 480GB"), 989e12);
  EXPECT_EQ(gpu_peak_bf16("NVIDIA H100 PCIe"), 756e12);
  EXPECT_EQ(gpu_peak_bf16("NVIDIA H100 NVL"), 835e12);
  EXPECT_EQ(gpu_peak_bf16("NVIDIA A100-SXM4-80GB"), 312e12);
  EXPECT_EQ(gpu_peak_bf16("NVIDIA H20"), 0.0);
  EXPECT_EQ(gpu_peak_bf16(""), 0.0);
}

}  // namespace
}  // namespace muster
