// What runs the GPU benchmark's cases: tensors, timing on a flushed L2 cache, rows of the report.
#pragma once

#include <algorithm>

#include "kernels/cuda/device.h"
#include "kernels/cuda/gpu_bench.h"
#include "kernels/cuda/vec.cuh"
#include "kernels/elementwise/elementwise.h"

namespace muster::cuda {

constexpr int64_t kFlushBytes = int64_t{512} << 20;  // several times the L2 cache of any GPU
constexpr DType kBf16 = DType::kBFloat16;
constexpr DType kFp32 = DType::kFloat32;

// Numbers in (−1, 1) that depend on their index only; zeros would run faster than real data.
template <typename T>
__global__ void fill_kernel(T* out, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (i >= n) return;
  uint32_t x = static_cast<uint32_t>(i) * 2654435761u;
  x ^= x >> 15;
  x *= 2246822519u;
  x ^= x >> 13;
  out[i] = from_float<T>(static_cast<float>(x) * 0x1p-31f - 1.0f);
}

// Reads more than the L2 cache holds. Writing would leave it full of lines that the timed kernel
// has to write back.
static __global__ void flush_kernel(const uint4* data, int64_t n, uint32_t* out) {
  uint32_t sum = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; i < n;
       i += static_cast<int64_t>(gridDim.x) * 256) {
    sum += data[i].x;
  }
  if (sum == 0x12345678u) *out = sum;  // never; keeps the loads
}

class Bench {
 public:
  Bench(const GpuBenchOptions& options, const std::function<void(const GpuBenchRow&)>& on_row)
      : options_(options), on_row_(on_row), memory_(0) {
    CUDA_CHECK(cudaSetDevice(0));
    cudaStream_t handle = nullptr;
    CUDA_CHECK(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking));
    stream_ = {Device::cuda(0), handle};
    CUDA_CHECK(cudaEventCreate(&begin_));
    CUDA_CHECK(cudaEventCreate(&end_));
    flush_ = zeros({kFlushBytes}, DType::kUInt8);
    cudaDeviceProp properties{};
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    report_.gpu = properties.name;
  }
  ~Bench() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    cudaStreamDestroy(handle_of(stream_));
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  const Stream& stream() const { return stream_; }
  Allocator& memory() { return memory_; }
  GpuBenchReport& report() { return report_; }

  Tensor numbers(Shape shape, DType dtype) {
    Tensor tensor(shape, dtype, memory_);
    const auto blocks = static_cast<unsigned>(ceil_div(tensor.numel(), 256));
    with_activation(dtype, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      fill_kernel<<<blocks, 256, 0, handle_of(stream_)>>>(static_cast<T*>(tensor.view().raw()),
                                                          tensor.numel());
    });
    CUDA_CHECK(cudaGetLastError());
    return tensor;
  }
  Tensor zeros(Shape shape, DType dtype) {
    Tensor tensor(shape, dtype, memory_);
    fill_zero(stream_, tensor);
    return tensor;
  }
  Tensor ints(const std::vector<int32_t>& values) {
    Tensor tensor({static_cast<int64_t>(values.size())}, DType::kInt32, memory_);
    CUDA_CHECK(cudaMemcpyAsync(tensor.view().raw(), values.data(), tensor.bytes(),
                               cudaMemcpyHostToDevice, handle_of(stream_)));
    CUDA_CHECK(cudaStreamSynchronize(handle_of(stream_)));
    return tensor;
  }

  bool wanted(const std::string& kernel) const {
    return kernel.find(options_.filter) != std::string::npos;
  }

  double median_ms(const std::function<void()>& call) {
    std::vector<float> times;
    for (int i = -2; i < options_.runs; ++i) {
      auto* data = static_cast<uint4*>(flush_.view().raw());
      flush_kernel<<<1024, 256, 0, handle_of(stream_)>>>(data, kFlushBytes / 16,
                                                         reinterpret_cast<uint32_t*>(data));
      CUDA_CHECK(cudaGetLastError());
      CUDA_CHECK(cudaEventRecord(begin_, handle_of(stream_)));
      call();
      CUDA_CHECK(cudaEventRecord(end_, handle_of(stream_)));
      CUDA_CHECK(cudaEventSynchronize(end_));
      float ms = 0.0f;
      CUDA_CHECK(cudaEventElapsedTime(&ms, begin_, end_));
      if (i >= 0) times.push_back(ms);
    }
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
  }
  void memory_row(const std::string& kernel, const std::string& shape, double bytes,
                  const std::function<void()>& call) {
    add_row(kernel, shape, bytes * 1e-6, true, report_.copy_gb_per_s, call);
  }
  void product_row(const std::string& kernel, const std::string& shape, double operations,
                   const std::function<void()>& call) {
    add_row(kernel, shape, operations * 1e-9, false, report_.matmul_tflop_per_s, call);
  }

 private:
  void add_row(const std::string& kernel, const std::string& shape, double work_per_ms,
               bool memory_bound, double ceiling, const std::function<void()>& call) {
    GpuBenchRow row{.kernel = kernel, .shape = shape, .memory_bound = memory_bound};
    row.median_ms = median_ms(call);
    row.rate = work_per_ms / row.median_ms;
    row.percent = 100.0 * row.rate / ceiling;
    if (on_row_) on_row_(row);
    report_.rows.push_back(row);
  }

  GpuBenchOptions options_;
  std::function<void(const GpuBenchRow&)> on_row_;
  DeviceAllocator memory_;
  Stream stream_;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
  Tensor flush_;
  GpuBenchReport report_;
};

inline std::string shape_of(std::initializer_list<int64_t> sizes) {
  return Shape(sizes).to_string();
}

// The products' cases, in a file of their own.
void bench_all_products(Bench& bench);

}  // namespace muster::cuda
