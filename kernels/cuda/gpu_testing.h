// Helpers of the GPU tests. The pattern: describe every operand once, as an Operand that exists on
// both sides, and hand expect_matches_cpu a call; it runs the op on the CPU and on the GPU,
// compares with a tolerance that it measures, and runs the GPU again for equal bits.
//
// The tolerance: the CPU twin computes in float32 from inputs that are exact in the operands'
// dtype. A naive low-precision version rounds every input once more; what that changes in the CPU's
// result, plus one rounding of the result, is its error, and the GPU may err by a small multiple of
// it.
#pragma once

#include <cuda_runtime_api.h>

#include <bit>
#include <cstring>

#include "kernels/cuda/check.h"
#include "kernels/cuda/device.h"
#include "kernels/testing.h"

namespace muster::testing {

// Skips, visibly, where there is no GPU.
class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda::device_count() == 0) GTEST_SKIP() << "no GPU on this machine";
  }
};

inline cuda::DeviceAllocator& gpu_memory() {
  static auto& allocator = *new cuda::DeviceAllocator(0);
  return allocator;
}

inline Stream gpu_stream() {
  static cudaStream_t handle = [] {
    cudaStream_t stream = nullptr;
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
  }();
  return {Device::cuda(0), handle};
}

inline uint16_t bf16_bits(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if (std::isnan(x)) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline float from_bf16_bits(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Rows (the first dimension) that lie apart, beginning `offset` elements into a buffer.
struct Layout {
  int64_t offset = 0;
  int64_t row_stride = 0;  // 0: contiguous
};

// One argument of an op: on the GPU in its dtype; on the CPU in float32 where that is a
// floating-point type of up to 32 bits (with the same, exactly representable, values), else in its
// dtype. Gaps of a strided layout hold NaN.
class Operand {
 public:
  Operand(Shape shape, DType dtype, Layout layout = {})
      : shape_(shape), dtype_(dtype), layout_(layout) {
    inner_ = shape.rank > 0 && shape[0] > 0 ? shape.numel() / shape[0] : 1;
    if (layout_.row_stride == 0) layout_.row_stride = inner_;
    elements_ = layout_.offset + std::max<int64_t>(shape[0], 1) * layout_.row_stride;
    host_ = Tensor({elements_}, is_real() ? DType::kFloat32 : dtype);
    if (is_real()) std::fill_n(host_.data<float>(), elements_, kPoison);
    device_ = Tensor({elements_}, dtype, gpu_memory());
  }
  static Operand random(Shape shape, DType dtype, uint64_t seed, double scale = 1.0,
                        double mean = 0.0, Layout layout = {}) {
    Operand operand(shape, dtype, layout);
    fill_random(operand.host(), seed, scale, mean);
    operand.round();
    return operand;
  }
  static Operand ints(const std::vector<int32_t>& values) {
    Operand operand({static_cast<int64_t>(values.size())}, DType::kInt32);
    std::copy(values.begin(), values.end(), operand.host_.data<int32_t>());
    return operand;
  }
  static Operand scalar(double value) {
    Operand operand({1}, DType::kFloat64);
    operand.host_.data<double>()[0] = value;
    return operand;
  }

  bool is_real() const { return dtype_ == DType::kFloat32 || dtype_ == DType::kBFloat16; }
  DType dtype() const { return dtype_; }
  // Relative error of one rounding.
  double unit() const {
    if (dtype_ == DType::kBFloat16) return 0x1p-9;
    return dtype_ == DType::kFloat64 ? 0x1p-53 : 0x1p-24;
  }
  TensorView host() const { return view_of(host_, Device::cpu()); }
  TensorView device() const { return view_of(device_, Device::cuda(0)); }

  // Makes the host's values exact in the dtype.
  void round() {
    if (dtype_ != DType::kBFloat16) return;
    float* data = host_.data<float>();
    for (int64_t i = 0; i < elements_; ++i) data[i] = from_bf16_bits(bf16_bits(data[i]));
  }
  // Changes every value by up to one rounding.
  void perturb(uint64_t seed) {
    if (!is_real()) return;
    const CounterRng rng(seed, RandomPurpose::kInit, 2);
    float* data = host_.data<float>();
    for (int64_t i = 0; i < elements_; ++i) {
      data[i] *= static_cast<float>(1.0 + unit() * (2.0 * rng.uniform(i) - 1.0));
    }
  }
  std::vector<char> save() const {
    const char* bytes = static_cast<const char*>(host_.view().raw());
    return std::vector<char>(bytes, bytes + host_.bytes());
  }
  void restore(const std::vector<char>& bytes) {
    std::memcpy(host_.view().raw(), bytes.data(), bytes.size());
  }
  void upload() const {
    std::vector<uint16_t> narrow;
    const void* from = host_.view().raw();
    if (dtype_ == DType::kBFloat16) {
      narrow.resize(elements_);
      for (int64_t i = 0; i < elements_; ++i) narrow[i] = bf16_bits(host_.data<float>()[i]);
      from = narrow.data();
    }
    CUDA_CHECK(cudaMemcpy(device_.view().raw(), from, device_.bytes(), cudaMemcpyHostToDevice));
    // A small copy from pageable memory returns before it has arrived, and our stream does not wait
    // for the default one.
    CUDA_CHECK(cudaDeviceSynchronize());
  }
  // Every element of the GPU's buffer, gaps included.
  std::vector<double> download() const {
    std::vector<char> raw(device_.bytes());
    CUDA_CHECK(cudaMemcpy(raw.data(), device_.view().raw(), raw.size(), cudaMemcpyDeviceToHost));
    std::vector<double> values(elements_);
    for (int64_t i = 0; i < elements_; ++i) values[i] = element(raw.data(), dtype_, i);
    return values;
  }
  // The same of the host's.
  std::vector<double> host_values() const {
    std::vector<double> values(elements_);
    const auto* raw = static_cast<const char*>(host_.view().raw());
    for (int64_t i = 0; i < elements_; ++i) values[i] = element(raw, host_.dtype(), i);
    return values;
  }
  // Whether an element of the buffer belongs to the view.
  bool inside(int64_t i) const {
    const int64_t at = i - layout_.offset;
    return at >= 0 && at / layout_.row_stride < shape_[0] && at % layout_.row_stride < inner_;
  }

 private:
  static double element(const char* raw, DType dtype, int64_t i) {
    switch (dtype) {
      case DType::kFloat32:
        return reinterpret_cast<const float*>(raw)[i];
      case DType::kBFloat16:
        return from_bf16_bits(reinterpret_cast<const uint16_t*>(raw)[i]);
      case DType::kFloat64:
        return reinterpret_cast<const double*>(raw)[i];
      default:
        return reinterpret_cast<const int32_t*>(raw)[i];
    }
  }
  TensorView view_of(const Tensor& buffer, Device device) const {
    std::array<int64_t, kMaxDims> stride{};
    int64_t step = 1;
    for (int i = shape_.rank - 1; i > 0; --i) {
      stride[i] = step;
      step *= shape_[i];
    }
    stride[0] = layout_.row_stride;
    char* data = static_cast<char*>(buffer.view().raw()) + layout_.offset * size_of(buffer.dtype());
    return TensorView(data, buffer.dtype(), shape_, stride, device);
  }

  Shape shape_;
  DType dtype_;
  Layout layout_;
  int64_t inner_ = 1;
  int64_t elements_ = 0;
  Tensor host_;
  Tensor device_;
};

// Where a call finds an operand: on the CPU or on the GPU.
class At {
 public:
  explicit At(bool gpu) : gpu_(gpu) {}
  TensorView operator()(const Operand& operand) const {
    return gpu_ ? operand.device() : operand.host();
  }

 private:
  bool gpu_;
};

using OpCall = std::function<void(const Stream&, const At&)>;

// Runs `call` on both sides. `outputs` may hold values before (what accumulates, what is aliased);
// fresh Operands are poison. `repeats`: the GPU promises the same bits in every run.
inline void expect_matches_cpu(const std::vector<Operand*>& inputs,
                               const std::vector<Operand*>& outputs, const OpCall& call,
                               double multiple = 4.0, bool repeats = true) {
  std::vector<std::vector<char>> in_before;
  std::vector<std::vector<char>> out_before;
  in_before.reserve(inputs.size());
  out_before.reserve(outputs.size());
  for (const Operand* operand : inputs) in_before.push_back(operand->save());
  for (const Operand* operand : outputs) out_before.push_back(operand->save());
  const auto restore = [&] {
    for (size_t i = 0; i < inputs.size(); ++i) inputs[i]->restore(in_before[i]);
    for (size_t i = 0; i < outputs.size(); ++i) outputs[i]->restore(out_before[i]);
  };
  const auto values = [&](bool gpu) {
    std::vector<std::vector<double>> all;
    all.reserve(outputs.size());
    for (const Operand* o : outputs) all.push_back(gpu ? o->download() : o->host_values());
    return all;
  };

  call(Stream::cpu(), At(false));
  const auto want = values(false);
  restore();
  // The error of a sum is itself random: the largest of a few trials stands for it.
  constexpr uint64_t kTrials = 4;
  std::vector<double> naive_error(outputs.size(), 0.0);
  for (uint64_t trial = 0; trial < kTrials; ++trial) {
    for (size_t i = 0; i < inputs.size(); ++i) inputs[i]->perturb(100 * trial + i);
    for (size_t i = 0; i < outputs.size(); ++i) outputs[i]->perturb(100 * trial + 50 + i);
    call(Stream::cpu(), At(false));
    const auto naive = values(false);
    restore();
    for (size_t o = 0; o < outputs.size(); ++o) {
      for (size_t i = 0; i < want[o].size(); ++i) {
        if (!outputs[o]->inside(static_cast<int64_t>(i)) || want[o][i] == naive[o][i]) continue;
        naive_error[o] = std::max(naive_error[o], std::abs(want[o][i] - naive[o][i]));
      }
    }
  }

  std::vector<std::vector<double>> got;
  for (int run = 0; run < 2; ++run) {
    for (const Operand* operand : inputs) operand->upload();
    for (const Operand* operand : outputs) operand->upload();
    call(gpu_stream(), At(true));
    CUDA_CHECK(cudaStreamSynchronize(static_cast<cudaStream_t>(gpu_stream().handle)));
    auto result = values(true);
    for (size_t o = 0; repeats && run == 1 && o < outputs.size(); ++o) {
      ASSERT_EQ(std::memcmp(result[o].data(), got[o].data(), got[o].size() * sizeof(double)), 0)
          << "output " << o << " differs from run to run";
    }
    got = std::move(result);
  }

  for (size_t o = 0; o < outputs.size(); ++o) {
    double largest = 0.0;
    for (const double x : want[o]) {
      if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
    }
    const double allowed = multiple * (naive_error[o] + outputs[o]->unit() * largest);
    ASSERT_TRUE(std::isfinite(allowed)) << "output " << o << ": the CPU's result is not finite";
    for (size_t i = 0; i < want[o].size(); ++i) {
      if (!outputs[o]->inside(static_cast<int64_t>(i))) {
        ASSERT_TRUE(std::isnan(got[o][i])) << "output " << o << ", gap element " << i;
        continue;
      }
      if (got[o][i] == want[o][i]) continue;
      ASSERT_TRUE(std::abs(got[o][i] - want[o][i]) <= allowed)
          << "output " << o << ", element " << i << ": got " << got[o][i] << ", want " << want[o][i]
          << ", allowed error " << allowed;
    }
  }
}

inline const std::vector<DType>& activation_dtypes() {
  static const std::vector<DType> dtypes{DType::kFloat32, DType::kBFloat16};
  return dtypes;
}

}  // namespace muster::testing
