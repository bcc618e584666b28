#include "kernels/global_norm/global_norm.h"

#include "kernels/testing.h"

namespace muster {
namespace {

using namespace testing;

double sum_of(const ConstTensorView& x, double start = 0.0) {
  Tensor sum({1}, DType::kFloat64);
  *sum.data<double>() = start;
  sum_of_squares(Stream::cpu(), sum, x);
  return *sum.data<double>();
}

TEST(GlobalNormTest, SumsSquaresInDouble) {
  for (const int64_t n : {0, 1, 3, 17, 257, 4095, 4097, 100003}) {
    const Tensor x = random_tensor({n}, 1, 1e-3);
    double want = 2.0;
    for (const double value : to_vector<double>(x)) want += value * value;
    EXPECT_NEAR(sum_of(x, 2.0), want, 1e-12 * want) << n;
  }
}

TEST(GlobalNormTest, HugeGradientsDoNotOverflowAndNansShow) {
  const Tensor x = random_tensor({33}, 2);
  x.data<float>()[32] = 1e30f;
  EXPECT_NEAR(sum_of(x), 1e60, 1e54);
  x.data<float>()[7] = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(std::isinf(sum_of(x)));
  x.data<float>()[20] = kPoison;
  EXPECT_TRUE(std::isnan(sum_of(x)));
}

TEST(GlobalNormTest, ThreadCountChangesNothing) {
  const Tensor x = random_tensor({100003}, 3);
  double sums[2];
  for (const int threads : {1, 3}) {
    const ThreadCount count(threads);
    sums[threads / 3] = sum_of(x);
  }
  EXPECT_EQ(sums[0], sums[1]);
}

}  // namespace
}  // namespace muster
