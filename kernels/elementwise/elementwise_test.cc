#include "kernels/elementwise/elementwise.h"

#include <bit>
#include <cstring>

#include "kernels/testing.h"

namespace muster {
namespace {

using namespace testing;

// What a 16-bit pattern stands for, from the definition of the format.
double value_of(uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Format {
  DType dtype;
  int exponent_bits;
  int mantissa_bits;
};
constexpr Format kBFloat16Format{DType::kBFloat16, 8, 7};
constexpr Format kFloat16Format{DType::kFloat16, 5, 10};

// Every pattern of a 16-bit format, in order.
Tensor all_patterns(DType dtype) {
  Tensor tensor({65536}, dtype);
  for (int i = 0; i < 65536; ++i) {
    static_cast<uint16_t*>(tensor.view().raw())[i] = static_cast<uint16_t>(i);
  }
  return tensor;
}

TEST(CopyCastTest, WidensEveryPatternExactlyAndBack) {
  for (const Format& format : {kBFloat16Format, kFloat16Format}) {
    const Tensor narrow = all_patterns(format.dtype);
    const Tensor wide = poisoned({65536});
    copy_cast(Stream::cpu(), wide, narrow);
    const Tensor back = Tensor::zeros({65536}, format.dtype);
    copy_cast(Stream::cpu(), back, wide);
    for (int i = 0; i < 65536; ++i) {
      const double want =
          value_of(static_cast<uint16_t>(i), format.exponent_bits, format.mantissa_bits);
      const float got = wide.data<float>()[i];
      const uint16_t again = static_cast<const uint16_t*>(back.view().raw())[i];
      if (std::isnan(want)) {
        ASSERT_TRUE(std::isnan(got));
        ASSERT_TRUE(std::isnan(value_of(again, format.exponent_bits, format.mantissa_bits)));
      } else {
        ASSERT_EQ(got, want);
        ASSERT_EQ(std::signbit(got), i >= 32768);
        ASSERT_EQ(again, i);
      }
    }
  }
}

// Between each two neighbours: the middle goes to the even one, the floats beside it to the nearer.
TEST(CopyCastTest, RoundsToNearestEven) {
  for (const Format& format : {kBFloat16Format, kFloat16Format}) {
    std::vector<float> inputs;
    std::vector<uint16_t> want;
    const int infinity = ((1 << format.exponent_bits) - 1) << format.mantissa_bits;
    for (int sign = 0; sign <= 0x8000; sign += 0x8000) {
      for (int i = 0; i < infinity; ++i) {
        const double low = value_of(i, format.exponent_bits, format.mantissa_bits);
        // Above the largest number the next one is what infinity's pattern would be as a number.
        const double high =
            i + 1 < infinity
                ? value_of(i + 1, format.exponent_bits, format.mantissa_bits)
                : 2 * low - value_of(i - 1, format.exponent_bits, format.mantissa_bits);
        const float middle = static_cast<float>((low + high) / 2);
        const float beside[] = {std::nextafter(middle, 0.0f), middle,
                                std::nextafter(middle, kInfinity)};
        const int nearest[] = {i, i % 2 == 0 ? i : i + 1, i + 1};
        for (int k = 0; k < 3; ++k) {
          inputs.push_back(sign != 0 ? -beside[k] : beside[k]);
          want.push_back(static_cast<uint16_t>(sign | nearest[k]));
        }
      }
    }
    const int64_t n = static_cast<int64_t>(inputs.size());
    const Tensor narrow({n}, format.dtype);
    copy_cast(Stream::cpu(), narrow, ConstTensorView(inputs.data(), DType::kFloat32, {n}));
    for (int64_t i = 0; i < n; ++i) {
      ASSERT_EQ(static_cast<const uint16_t*>(narrow.view().raw())[i], want[i])
          << inputs[i] << " to " << name_of(format.dtype);
    }
  }
}

TEST(CopyCastTest, KeepsNansWhateverTheirPayload) {
  std::vector<float> inputs;
  for (const uint32_t bits : {0x7f800001u, 0x7fffffffu, 0x7fc00000u, 0xff800001u, 0xffffffffu}) {
    inputs.push_back(std::bit_cast<float>(bits));
  }
  const int64_t n = static_cast<int64_t>(inputs.size());
  for (const Format& format : {kBFloat16Format, kFloat16Format}) {
    const Tensor narrow({n}, format.dtype);
    copy_cast(Stream::cpu(), narrow, ConstTensorView(inputs.data(), DType::kFloat32, {n}));
    for (int64_t i = 0; i < n; ++i) {
      const uint16_t bits = static_cast<const uint16_t*>(narrow.view().raw())[i];
      EXPECT_TRUE(std::isnan(value_of(bits, format.exponent_bits, format.mantissa_bits)));
    }
  }
}

TEST(CopyCastTest, BetweenTheSixteenBitFormats) {
  for (const auto& [from, to] :
       {std::pair{kBFloat16Format, kFloat16Format}, std::pair{kFloat16Format, kBFloat16Format}}) {
    const Tensor in = all_patterns(from.dtype);
    const Tensor direct = Tensor::zeros({65536}, to.dtype);
    copy_cast(Stream::cpu(), direct, in);
    const Tensor wide = poisoned({65536});
    const Tensor in_steps = Tensor::zeros({65536}, to.dtype);
    copy_cast(Stream::cpu(), wide, in);
    copy_cast(Stream::cpu(), in_steps, wide);
    EXPECT_EQ(std::memcmp(direct.view().raw(), in_steps.view().raw(), direct.bytes()), 0);
  }
}

TEST(CopyCastTest, WritesTheWholeViewAndNoMore) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const int64_t n : {0, 1, 7, 8, 9, 255, 257, 4097, 20001}) {
      const Tensor x = random_tensor({n}, 1);
      const Tensor narrow = Tensor::zeros({n + 1}, dtype);
      copy_cast(Stream::cpu(), narrow.view().slice(0, n), x);
      const Tensor back = poisoned({n + 1});
      copy_cast(Stream::cpu(), back.view().slice(0, n), narrow.view().slice(0, n));
      for (int64_t i = 0; i < n; ++i) {
        ASSERT_NEAR(back.data<float>()[i], x.data<float>()[i], std::abs(x.data<float>()[i]) / 256)
            << i;
      }
      EXPECT_TRUE(std::isnan(back.data<float>()[n]));
      const char* past = static_cast<const char*>(narrow.view().raw()) + n * size_of(dtype);
      EXPECT_TRUE(past[0] == 0 && past[1] == 0);
    }
  }
}

TEST(CopyCastDeathTest, RefusesIntegers) {
  const Tensor ids = int_tensor({1, 2});
  EXPECT_DEATH(copy_cast(Stream::cpu(), poisoned({2}), ids), "int32 to float32");
}

TEST(FillZeroTest, ClearsEveryByteOfTheView) {
  for (const int64_t n : {0, 1, 17, 50001}) {
    const Tensor out = poisoned({n + 1});
    fill_zero(Stream::cpu(), out.view().slice(0, n));
    for (int64_t i = 0; i < n; ++i) ASSERT_EQ(out.data<float>()[i], 0.0f);
    EXPECT_TRUE(std::isnan(out.data<float>()[n]));
  }
}

TEST(AddTest, AddsAlsoInPlace) {
  for (const int64_t n : {0, 1, 3, 17, 257, 20001}) {
    const Tensor a = random_tensor({n}, 1);
    const Tensor b = random_tensor({n}, 2);
    std::vector<float> want = to_vector<float>(a);
    for (int64_t i = 0; i < n; ++i) want[i] += b.data<float>()[i];
    const Tensor out = poisoned({n});
    add(Stream::cpu(), out, a, b);
    EXPECT_EQ(to_vector<float>(out), want);
    add(Stream::cpu(), b, a, b);
    EXPECT_EQ(to_vector<float>(b), want);
    assign(b, to_vector<float>(a));
    add(Stream::cpu(), a, a, b);
    add(Stream::cpu(), b, b, b);
    EXPECT_EQ(to_vector<float>(a), to_vector<float>(b));
  }
}

}  // namespace
}  // namespace muster
