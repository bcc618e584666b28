#include "kernels/rope/rope.h"

#include "kernels/testing.h"

namespace muster {
namespace {

using namespace testing;

constexpr double kPi = 3.14159265358979323846;

Tensor table_of(int64_t positions, int64_t head_dim, const RopeOptions& options = {}) {
  const Tensor table = poisoned({positions, 2, head_dim / 2});
  rope_table(table, options);
  return table;
}

// The angle at position 1 of pair i, read back from a table.
double angle(const Tensor& table, int64_t i) {
  const int64_t half = table.shape()[2];
  const float* row = table.data<float>() + 2 * half;
  return std::atan2(row[half + i], row[i]);
}

// Rotation straight from the definition, in double; T is the precision of table and products.
template <typename T>
std::vector<T> reference(const std::vector<T>& x, const Tensor& positions, int64_t heads, int64_t d,
                         double theta, bool inverse) {
  std::vector<T> out(x.size());
  for (int64_t n = 0; n < positions.numel(); ++n) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < d / 2; ++i) {
        const double turn = positions.data<int32_t>()[n] * std::pow(theta, -2.0 * i / d);
        const T cosine = static_cast<T>(std::cos(turn));
        const T sine = static_cast<T>(inverse ? -std::sin(turn) : std::sin(turn));
        const int64_t at = (n * heads + h) * d + i;
        out[at] = x[at] * cosine - x[at + d / 2] * sine;
        out[at + d / 2] = x[at + d / 2] * cosine + x[at] * sine;
      }
    }
  }
  return out;
}

TEST(RopeTest, TurnsAndTurnsBack) {
  for (const int64_t d : {2, 6, 34, 64}) {
    for (const int64_t n : {0, 1, 5, 63}) {
      for (const int64_t heads : {1, 3}) {
        const Tensor table = table_of(1000, d);
        const Tensor positions = random_ints({n}, 1, 0, 1000);
        const Tensor x = random_tensor({n, heads, d}, 2);
        for (const bool inverse : {false, true}) {
          const std::vector<double> want =
              reference(to_vector<double>(x), positions, heads, d, 10000.0, inverse);
          const std::vector<float> naive =
              reference(to_vector<float>(x), positions, heads, d, 10000.0, inverse);
          rope_apply(Stream::cpu(), x, table, positions, inverse);
          expect_close(x, want, naive);
        }
        // Turned forth and back: where it began.
        const std::vector<double> start = to_vector<double>(random_tensor({n, heads, d}, 2));
        EXPECT_LE(max_error(to_vector<double>(x), start), 2e-6);
      }
    }
  }
}

// The transpose of a rotation is its inverse: the header's claim about the gradient.
TEST(RopeTest, InverseIsTheGradient) {
  const int64_t n = 3, heads = 2, d = 6;
  const Tensor table = table_of(50, d);
  const Tensor positions = random_ints({n}, 1, 0, 50);
  const std::vector<double> x = to_vector<double>(random_tensor({n, heads, d}, 2));
  const Tensor grad = random_tensor({n, heads, d}, 3);
  const std::vector<double> g = to_vector<double>(grad);
  rope_apply(Stream::cpu(), grad, table, positions, true);
  expect_gradient(grad, finite_difference(
                            [&](const std::vector<double>& at) {
                              return dot(reference(at, positions, heads, d, 10000.0, false), g);
                            },
                            x));
}

TEST(RopeTest, TurnsAPartOfAWiderBufferInPlace) {
  const int64_t n = 5, heads = 3, d = 34;
  const Tensor table = table_of(100, d);
  const Tensor positions = random_ints({n}, 1, 0, 100);
  const Tensor dense = random_tensor({n, heads, d}, 2);
  const Strided part({n, heads, d}, 11, 11 + heads * d + 30);
  assign(part, to_vector<float>(dense));
  rope_apply(Stream::cpu(), dense, table, positions, false);
  rope_apply(Stream::cpu(), part, table, positions, false);
  expect_same_bits(dense, part.view());
  part.expect_gaps_untouched();
}

TEST(RopeTest, ThreadCountChangesNoBit) {
  Tensor x[2];
  for (const int run : {0, 1}) {
    const ThreadCount count(run == 0 ? 1 : 3);
    const Tensor table = table_of(500, 64);
    x[run] = random_tensor({301, 2, 64}, 1);
    rope_apply(Stream::cpu(), x[run], table, random_ints({301}, 2, 0, 500), false);
  }
  expect_same_bits(x[0], x[1]);
}

TEST(RopeTableTest, HoldsCosinesThenSines) {
  const Tensor table = table_of(4096, 64, {.theta = 500000.0});
  for (const int64_t p : {0, 1, 777, 4095}) {
    for (int64_t i = 0; i < 32; ++i) {
      const double turn = p * std::pow(500000.0, -2.0 * i / 64);
      EXPECT_NEAR(table.data<float>()[p * 64 + i], std::cos(turn), 6e-8);
      EXPECT_NEAR(table.data<float>()[p * 64 + 32 + i], std::sin(turn), 6e-8);
    }
  }
}

TEST(RopeTableTest, LinearScalingDividesPositions) {
  const Tensor plain = table_of(101, 16);
  const Tensor scaled = table_of(401, 16, {.scaling = "linear", .factor = 4.0});
  for (int64_t p = 0; p <= 100; ++p) {
    EXPECT_LE(max_error(to_vector<float>(plain.view().slice(p, p + 1)),
                        to_vector<float>(scaled.view().slice(4 * p, 4 * p + 1))),
              1e-6);
  }
}

// Llama 3.1's numbers: theta 500000, factor 8, bounds 1 and 4, 8192 positions.
TEST(RopeTableTest, Llama3StretchesLongWavelengthsOnly) {
  const RopeOptions options{.theta = 500000.0,
                            .scaling = "llama3",
                            .factor = 8.0,
                            .low_freq_factor = 1.0,
                            .high_freq_factor = 4.0,
                            .original_positions = 8192};
  const Tensor table = table_of(2, 128, options);
  int kept = 0, stretched = 0, between = 0;
  for (int64_t i = 0; i < 64; ++i) {
    const double plain = std::pow(500000.0, -2.0 * i / 128);
    const double wavelength = 2 * kPi / plain;
    double want = plain;
    if (wavelength > 8192.0 / 1.0) {
      want = plain / 8;
      ++stretched;
    } else if (wavelength >= 8192.0 / 4.0) {
      const double smooth = (8192.0 / wavelength - 1.0) / (4.0 - 1.0);
      want = (1 - smooth) * plain / 8 + smooth * plain;
      ++between;
    } else {
      ++kept;
    }
    EXPECT_NEAR(angle(table, i), want, 1e-6 * want) << i;
  }
  EXPECT_GT(kept, 0);
  EXPECT_GT(between, 0);
  EXPECT_GT(stretched, 0);
}

TEST(RopeDeathTest, RefusesAPositionBeyondTheTable) {
  const Tensor table = table_of(10, 4);
  EXPECT_DEATH(
      rope_apply(Stream::cpu(), random_tensor({1, 1, 4}, 1), table, int_tensor({10}), false), "10");
}

}  // namespace
}  // namespace muster
