#include "kernels/cuda/gpu_testing.h"
#include "kernels/fp8/fp8.h"

namespace muster {
namespace {

using namespace testing;

class Fp8GpuTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped() && !fp8_supported(Device::cuda(0))) {
      GTEST_SKIP() << "this GPU has no float8 products";
    }
  }
};

std::vector<uint8_t> bytes_of(const Tensor& tensor) {
  std::vector<uint8_t> bytes(tensor.bytes());
  CUDA_CHECK(cudaMemcpy(bytes.data(), tensor.view().raw(), bytes.size(), cudaMemcpyDefault));
  return bytes;
}

void poison(const Fp8Operand& operand) {
  for (const Tensor& tensor : {operand.data, operand.transposed, operand.scale}) {
    if (tensor.defined()) CUDA_CHECK(cudaMemset(tensor.view().raw(), 0xff, tensor.bytes()));
  }
  CUDA_CHECK(cudaDeviceSynchronize());
}

// Rounding has one right answer, and no sum is involved: every byte agrees.
void expect_same_bytes(const Fp8Operand& gpu, const Fp8Operand& cpu) {
  CUDA_CHECK(cudaStreamSynchronize(static_cast<cudaStream_t>(gpu_stream().handle)));
  EXPECT_EQ(bytes_of(gpu.scale), bytes_of(cpu.scale));
  if (gpu.data.defined()) {
    EXPECT_EQ(bytes_of(gpu.data), bytes_of(cpu.data));
  }
  if (gpu.transposed.defined()) {
    EXPECT_EQ(bytes_of(gpu.transposed), bytes_of(cpu.transposed));
  }
}

constexpr DType kE4M3 = DType::kFloat8E4M3;
constexpr DType kE5M2 = DType::kFloat8E5M2;

TEST_F(Fp8GpuTest, QuantisesToTheBytesOfTheCpu) {
  for (const DType dtype : activation_dtypes()) {
    for (const DType format : {kE4M3, kE5M2}) {
      for (const auto& [rows, columns, gap] : {std::array<int64_t, 3>{16, 16, 0},
                                               {144, 272, 0},
                                               {16, 400, 8},
                                               {656, 128, 0},
                                               {384, 1040, 16}}) {
        SCOPED_TRACE(Shape({rows, columns, gap}).to_string() + name_of(dtype) + name_of(format));
        Operand x = Operand::random({rows, columns}, dtype, 1, 0.1, 0.0, {gap, columns + 2 * gap});
        x.upload();
        const Fp8Operand cpu = fp8_quantise(Stream::cpu(), host_allocator(), x.host(), format);
        Operand amax = Operand::random({1}, DType::kFloat32, 2, 0.0, 0.3);
        amax.upload();
        expect_same_bytes(fp8_quantise(gpu_stream(), gpu_memory(), x.device(), format,
                                       Fp8Copies::kBoth, amax.device()),
                          fp8_quantise(Stream::cpu(), host_allocator(), x.host(), format,
                                       Fp8Copies::kBoth, amax.host()));
        for (const Fp8Copies copies :
             {Fp8Copies::kBoth, Fp8Copies::kData, Fp8Copies::kTransposed}) {
          // Blocks come back for the same request: the second result lies where poison was.
          poison(fp8_quantise(gpu_stream(), gpu_memory(), x.device(), format, copies));
          expect_same_bytes(fp8_quantise(gpu_stream(), gpu_memory(), x.device(), format, copies),
                            cpu);
        }
      }
    }
  }
}

TEST_F(Fp8GpuTest, ZerosTinyNumbersNaNAndInfinity) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const DType dtype : activation_dtypes()) {
    for (const float value : {0.0f, 0x1p-110f, 0x1p-90f, kPoison, kInfinity, -0x1p120f}) {
      Operand x = Operand::random({32, 32}, dtype, 1, std::abs(value) < 1.0f ? 0.0 : 1.0);
      x.host().data<float>()[100] = value;
      x.upload();
      expect_same_bytes(fp8_quantise(gpu_stream(), gpu_memory(), x.device(), kE4M3),
                        fp8_quantise(Stream::cpu(), host_allocator(), x.host(), kE4M3));
    }
  }
}

// On both sides from the same bytes (see above); what is compared is the product.
void check(int64_t m, int64_t n, int64_t k, DType out_type, DType a_format, DType b_format,
           bool with_bias, bool with_addend, bool exact_sums) {
  SCOPED_TRACE(Shape({m, n, k}).to_string() + name_of(out_type) + name_of(a_format));
  Operand a = Operand::random({m, k}, DType::kBFloat16, 1, 0.01);
  Operand b = Operand::random({n, k}, DType::kBFloat16, 2, 3.0);
  Operand bias = Operand::random({n}, out_type, 3, 0.1);
  Operand out({m, n}, out_type);
  Operand sum = Operand::random({m, n}, out_type, 4, 0.1, 0.0, {16, n + 32});
  Operand& result = with_addend ? sum : out;
  const auto call = [&](const Stream& stream, const At& at) {
    auto& memory = stream.device.is_cpu() ? static_cast<Allocator&>(host_allocator())
                                          : static_cast<Allocator&>(gpu_memory());
    const Fp8Operand a8 = fp8_quantise(stream, memory, at(a), a_format, Fp8Copies::kData);
    const Fp8Operand b8 = fp8_quantise(stream, memory, at(b), b_format, Fp8Copies::kData);
    fp8_matmul(stream, at(result), a8.by_columns(), b8.by_columns(),
               {.bias = with_bias ? at(bias) : TensorView(),
                .addend = with_addend ? at(sum) : TensorView(),
                .exact_sums = exact_sums});
  };
  a.upload();
  b.upload();
  expect_matches_cpu({&a, &b, &bias}, {&result}, call);
}

TEST_F(Fp8GpuTest, ProductsMatchTheCpu) {
  for (const DType out_type : {DType::kBFloat16, DType::kFloat32}) {
    for (const bool exact_sums : {false, true}) {
      for (const bool with_addend : {false, true}) {
        const bool with_bias = out_type == DType::kBFloat16;
        check(16, 16, 16, out_type, kE4M3, kE4M3, with_bias, with_addend, exact_sums);
        check(144, 272, 400, out_type, kE4M3, kE4M3, with_bias, with_addend, exact_sums);
        check(256, 128, 512, out_type, kE5M2, kE4M3, false, with_addend, exact_sums);
        check(272, 48, 1040, out_type, kE5M2, kE4M3, false, with_addend, exact_sums);
        check(64, 80, 96, out_type, kE4M3, kE5M2, false, with_addend, exact_sums);
      }
    }
  }
}

}  // namespace
}  // namespace muster
