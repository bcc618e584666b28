#include "kernels/adamw/adamw.h"
#include "kernels/cuda/gpu_testing.h"

namespace muster {
namespace {

using namespace testing;
using AdamwGpuTest = GpuTest;

void check(int64_t n, int64_t offset, const std::vector<AdamwSegment>& segments, int64_t step) {
  const Layout layout{.offset = offset, .row_stride = 1};
  Operand weight = Operand::random({n}, DType::kFloat32, 1, 1.0, 0.0, layout);
  Operand m = Operand::random({n}, DType::kFloat32, 2, 0.1, 0.0, layout);
  Operand v = Operand::random({n}, DType::kFloat32, 3, 0.01, 0.1, layout);
  Operand grad = Operand::random({n}, DType::kFloat32, 4, 2.0, 0.0, layout);
  const AdamwOptions options{.lr = 1e-2, .step = step, .grad_scale = 0.125};
  expect_matches_cpu({&grad}, {&weight, &m, &v}, [&](const Stream& stream, const At& at) {
    adamw_step(stream, at(weight), at(m), at(v), at(grad), segments, options);
  });
}

TEST_F(AdamwGpuTest, MatchesTheCpuOnOddSegmentsWithGaps) {
  for (const int64_t offset : {0, 4, 1}) {
    check(10007, offset,
          {{3, 5, 0.1f},
           {5, 1027, 0.0f},
           {1027, 1028, 0.1f},
           {2050, 9001, 0.1f},
           {9001, 10007, 0.0f}},
          7);
  }
  check(1, 0, {{0, 1, 0.1f}}, 1);
  check(100, 0, {}, 1);
}

TEST_F(AdamwGpuTest, TakesMoreSegmentsThanOneLaunchHolds) {
  std::vector<AdamwSegment> segments;
  for (int64_t i = 0; i < 1500; ++i) {
    segments.push_back({i * 7, i * 7 + 6, i % 2 == 0 ? 0.1f : 0.0f});
  }
  check(1500 * 7, 0, segments, 100);
}

}  // namespace
}  // namespace muster
