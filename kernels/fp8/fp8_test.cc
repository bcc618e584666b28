#include "kernels/fp8/fp8.h"

#include "kernels/fp8/format.h"
#include "kernels/testing.h"

namespace muster {
namespace {

using namespace testing;

constexpr DType kFormats[] = {DType::kFloat8E4M3, DType::kFloat8E5M2};

TEST(Fp8FormatTest, EveryNumberComesBack) {
  for (const DType format : kFormats) {
    int numbers = 0;
    for (int bits = 0; bits < 256; ++bits) {
      const float x = from_fp8(static_cast<uint8_t>(bits), format);
      if (!std::isfinite(x)) continue;
      EXPECT_EQ(to_fp8(x, format), bits) << name_of(format);
      ++numbers;
    }
    EXPECT_EQ(numbers, format == DType::kFloat8E4M3 ? 254 : 248);
  }
  EXPECT_EQ(from_fp8(0x7e, DType::kFloat8E4M3), 448.0f);
  EXPECT_EQ(from_fp8(0x01, DType::kFloat8E4M3), 0x1p-9f);
  EXPECT_EQ(from_fp8(0x7b, DType::kFloat8E5M2), 57344.0f);
  EXPECT_EQ(from_fp8(0x81, DType::kFloat8E5M2), -0x1p-16f);
}

// Against a search through all numbers of the format.
TEST(Fp8FormatTest, RoundsToTheNearestAndTiesToEven) {
  for (const DType format : kFormats) {
    const auto nearest = [&](float x) {
      uint8_t best = 0;
      for (int bits = 0; bits < 128; ++bits) {
        const double value = from_fp8(static_cast<uint8_t>(bits), format);
        if (!std::isfinite(value)) break;
        const double error = std::abs(value - x);
        const double least = std::abs(from_fp8(best, format) - double{x});
        if (error < least || (error == least && bits % 2 == 0)) best = static_cast<uint8_t>(bits);
      }
      return best;
    };
    const CounterRng rng(1, RandomPurpose::kInit, 0);
    for (int i = 0; i < 2000; ++i) {
      const auto x = static_cast<float>(std::exp2(40.0 * rng.uniform(i) - 24.0));
      ASSERT_EQ(to_fp8(x, format), nearest(x)) << x;
      ASSERT_EQ(to_fp8(-x, format), nearest(x) | 0x80) << x;
    }
    for (int bits = 0; bits < 100; ++bits) {  // half way between two neighbours
      const float x = (from_fp8(static_cast<uint8_t>(bits), format) +
                       from_fp8(static_cast<uint8_t>(bits + 1), format)) /
                      2;
      ASSERT_EQ(to_fp8(x, format), bits + bits % 2) << x;
    }
    EXPECT_EQ(to_fp8(1e9f, format), to_fp8(kMaxE5M2, format));
    EXPECT_EQ(to_fp8(std::numeric_limits<float>::infinity(), format), to_fp8(1e9f, format));
    EXPECT_TRUE(std::isnan(from_fp8(to_fp8(kPoison, format), format)));
  }
}

TEST(Fp8Test, QuantisedNumbersComeBackToTheFormatsPrecision) {
  for (const DType format : kFormats) {
    Strided x({48, 80}, 3, 90);
    fill_random(x, 1, 1e-3);
    const Fp8Operand got = fp8_quantise(Stream::cpu(), host_allocator(), x, format);
    const float scale = got.scale.data<float>()[0];
    const auto* data = static_cast<const uint8_t*>(got.data.view().raw());
    const auto* transposed = static_cast<const uint8_t*>(got.transposed.view().raw());
    const std::vector<float> want = to_vector<float>(x.view());
    // Half a unit in the last place, and half of the smallest step below the normal numbers.
    const double relative = format == DType::kFloat8E4M3 ? 0x1p-4 : 0x1p-3;
    const double smallest = scale * (format == DType::kFloat8E4M3 ? 0x1p-10 : 0x1p-17);
    uint8_t largest = 0;
    for (int64_t i = 0; i < 48 * 80; ++i) {
      const double back = double{scale} * from_fp8(data[i], format);
      ASSERT_LE(std::abs(back - want[i]), 1.001 * relative * std::abs(want[i]) + smallest);
      ASSERT_EQ(data[i], transposed[i % 80 * 48 + i / 80]);
      largest = std::max<uint8_t>(largest, data[i] & 0x7f);
    }
    EXPECT_EQ(largest, to_fp8(1e9f, format)) << "the range is used up to its end";
  }
}

TEST(Fp8Test, KnownAmaxIsTaken) {
  const Tensor x = random_tensor({16, 32}, 1);
  Tensor amax({1}, DType::kFloat32);
  amax.data<float>()[0] = 100.0f;
  const Fp8Operand got =
      fp8_quantise(Stream::cpu(), host_allocator(), x, DType::kFloat8E4M3, Fp8Copies::kBoth, amax);
  EXPECT_EQ(got.scale.data<float>()[0], 100.0f / 448.0f);
  const auto* data = static_cast<const uint8_t*>(got.data.view().raw());
  EXPECT_EQ(data[5], to_fp8(x.data<float>()[5] * (448.0f / 100.0f), DType::kFloat8E4M3));
}

TEST(Fp8Test, ZerosAndNaN) {
  const Tensor x = Tensor::zeros({16, 16}, DType::kFloat32);
  Fp8Operand got = fp8_quantise(Stream::cpu(), host_allocator(), x, DType::kFloat8E4M3);
  const Tensor out = poisoned({16, 16});
  fp8_matmul(Stream::cpu(), out, got.by_columns(), got.by_rows());
  for (int64_t i = 0; i < 256; ++i) EXPECT_EQ(out.data<float>()[i], 0.0f);
  x.data<float>()[7] = kPoison;
  got = fp8_quantise(Stream::cpu(), host_allocator(), x, DType::kFloat8E4M3);
  fp8_matmul(Stream::cpu(), out, got.by_columns(), got.by_rows());
  EXPECT_TRUE(std::isnan(out.data<float>()[0]));
}

// A whole layer, as the contract shows it, against the same in full precision: what float8 costs
// is what rounding the operands costs.
TEST(Fp8Test, LayerIsThatOfItsRoundedOperands) {
  const int64_t m = 48;
  const int64_t n = 32;
  const int64_t k = 80;
  const Stream cpu = Stream::cpu();
  const Tensor x = random_tensor({m, k}, 1);
  const Tensor weight = random_tensor({n, k}, 2, 0.02);
  const Tensor bias = random_tensor({n}, 3);
  const Tensor grad_out = random_tensor({m, n}, 4, 1e-4);
  const Tensor out = poisoned({m, n});
  const Tensor grad_x = poisoned({m, k});
  const Tensor grad_weight = random_tensor({n, k}, 5);
  const auto before = to_vector<double>(grad_weight);
  auto& memory = host_allocator();
  const Fp8Operand x8 = fp8_quantise(cpu, memory, x, DType::kFloat8E4M3);
  const Fp8Operand weight8 = fp8_quantise(cpu, memory, weight, DType::kFloat8E4M3);
  const Fp8Operand grad8 = fp8_quantise(cpu, memory, grad_out, DType::kFloat8E5M2);
  fp8_matmul(cpu, out, x8.by_columns(), weight8.by_columns(), {.bias = bias});
  fp8_matmul(cpu, grad_x, grad8.by_columns(), weight8.by_rows(), {.exact_sums = true});
  fp8_matmul(cpu, grad_weight, grad8.by_rows(), x8.by_rows(),
             {.addend = grad_weight, .exact_sums = true});

  const auto decode = [](const Fp8Operand& from) {
    std::vector<double> values;
    const auto* bits = static_cast<const uint8_t*>(from.data.view().raw());
    for (int64_t i = 0; i < from.data.numel(); ++i) {
      values.push_back(double{from.scale.data<float>()[0]} * from_fp8(bits[i], from.data.dtype()));
    }
    return values;
  };
  const auto a = decode(x8);
  const auto w = decode(weight8);
  const auto g = decode(grad8);
  std::vector<double> want_out(m * n);
  std::vector<double> want_x(m * k);
  std::vector<double> want_weight = before;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      want_out[i * n + j] = bias.data<float>()[j];
      for (int64_t p = 0; p < k; ++p) {
        want_out[i * n + j] += a[i * k + p] * w[j * k + p];
        want_x[i * k + p] += g[i * n + j] * w[j * k + p];
        want_weight[j * k + p] += g[i * n + j] * a[i * k + p];
      }
    }
  }
  const auto narrow = [](const std::vector<double>& v) {
    return std::vector<float>(v.begin(), v.end());
  };
  expect_close(out, want_out, narrow(want_out));
  expect_close(grad_x, want_x, narrow(want_x));
  expect_close(grad_weight, want_weight, narrow(want_weight));
}

TEST(Fp8Test, SizesThatFit) {
  EXPECT_TRUE(fp8_fits(16, 32, 48));
  EXPECT_FALSE(fp8_fits(16, 32, 40));
  EXPECT_FALSE(fp8_fits(0, 32, 48));
  EXPECT_TRUE(fp8_supported(Device::cpu()));
}

}  // namespace
}  // namespace muster
