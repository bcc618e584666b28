#include "kernels/cuda/gpu_testing.h"
#include "kernels/rope/rope.h"

namespace muster {
namespace {

using namespace testing;
using RopeGpuTest = GpuTest;

void check(DType dtype, int64_t tokens, int64_t heads, int64_t width, int64_t offset, int64_t gap) {
  Operand x = Operand::random({tokens, heads, width}, dtype, 1, 1.0, 0.0,
                              {offset, heads * width + offset + gap});
  Operand table({100, 2, width / 2}, DType::kFloat32);
  rope_table(table.host(), {.theta = 500000.0, .scaling = "llama3", .factor = 8.0});
  std::vector<int32_t> ids;
  for (int64_t n = 0; n < tokens; ++n) ids.push_back(static_cast<int32_t>(n * 37 % 100));
  Operand positions = Operand::ints(ids);
  for (const bool inverse : {false, true}) {
    expect_matches_cpu({&table, &positions}, {&x}, [&](const Stream& stream, const At& at) {
      rope_apply(stream, at(x), at(table), at(positions), inverse);
    });
  }
}

TEST_F(RopeGpuTest, MatchesTheCpuOnPartsOfAQkvBuffer) {
  for (const DType dtype : activation_dtypes()) {
    check(dtype, 1, 1, 2, 0, 0);
    check(dtype, 7, 3, 10, 3, 5);
    check(dtype, 33, 5, 64, 64, 128);
    check(dtype, 129, 2, 128, 0, 256);
    check(dtype, 5, 4, 80, 80, 80);
  }
}

}  // namespace
}  // namespace muster
