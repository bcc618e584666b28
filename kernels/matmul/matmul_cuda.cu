// Matrix products through cuBLASLt: inputs float32 or bfloat16 (both alike), the result in the
// inputs' dtype or in float32. One plan a shape, kept for the life of the process.
#include <algorithm>
#include <array>
#include <atomic>
#include <compare>
#include <limits>
#include <map>
#include <mutex>

#include "kernels/cuda/column_sums.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/vec.cuh"
#include "kernels/matmul/cublaslt.h"
#include "kernels/matmul/matmul_cuda.h"

namespace muster::cuda {
namespace {

// Of cuBLASLt's scratch memory; 32 MiB is what NVIDIA recommends for Hopper.
constexpr size_t kWorkspaceBytes = 32 << 20;
constexpr int kCandidates = 8;
constexpr int kTimedRuns = 3;

std::atomic<bool> measure_new_shapes{true};

// Everything that an algorithm's choice depends on.
struct Key {
  int device;
  int64_t m, n, k;
  int64_t stride_out, stride_a, stride_b;
  DType out_type, in_type;
  bool transpose_a, transpose_b, accumulate, bias;
  int64_t align_out, align_a, align_b;
  auto operator<=>(const Key&) const = default;
};

// cuBLASLt is column-major: out^T = op(b)^T · op(a)^T, so its A is our b and its B our a.
struct Plan {
  bool found = false;  // cuBLASLt has no kernel for some shapes
  cublasLtMatmulDesc_t op = nullptr;
  cublasLtMatrixLayout_t a = nullptr;
  cublasLtMatrixLayout_t b = nullptr;
  cublasLtMatrixLayout_t out = nullptr;
  cublasLtMatmulAlgo_t algo{};
};

cudaDataType_t cuda_type(DType dtype) {
  if (dtype == DType::kFloat32) return CUDA_R_32F;
  MUSTER_CHECK(dtype == DType::kBFloat16, name_of(dtype));
  return CUDA_R_16BF;
}

// The largest power of two up to 256 that divides the address.
int64_t alignment(const void* p) {
  const auto address = reinterpret_cast<uintptr_t>(p) | 256;
  return static_cast<int64_t>(address & (~address + 1));
}

int64_t row_stride(const ConstTensorView& view) {
  return std::max(view.size(0) > 1 ? view.stride(0) : 0, view.size(1));
}

cublasLtHandle_t handle_for(int device) {
  static auto& handles = *new std::map<int, cublasLtHandle_t>();
  cublasLtHandle_t& handle = handles[device];
  if (handle == nullptr) CUBLAS_CHECK(cublaslt().Create(&handle));
  return handle;
}

template <typename T>
void set(cublasLtMatmulDesc_t op, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  CUBLAS_CHECK(cublaslt().MatmulDescSetAttribute(op, attribute, &value, sizeof(value)));
}
template <typename T>
void set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
         const T& value) {
  CUBLAS_CHECK(
      cublaslt().MatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
}

cublasStatus_t run(const Stream& stream, const Plan& plan, const cublasLtMatmulAlgo_t& algo,
                   void* out, const void* a, const void* b, bool accumulate) {
  const float one = 1.0f;
  const float beta = accumulate ? 1.0f : 0.0f;
  return cublaslt().Matmul(handle_for(stream.device.index), plan.op, &one, b, plan.b, a, plan.a,
                           &beta, out, plan.out, out, plan.out, &algo,
                           workspace(stream, Scratch::kMatmul, kWorkspaceBytes), kWorkspaceBytes,
                           handle_of(stream));
}

// Milliseconds of one run, the best of a few; infinity where the algorithm refuses.
float time_of(const Stream& stream, const Plan& plan, const cublasLtMatmulAlgo_t& algo, void* out,
              const void* a, const void* b, bool accumulate) {
  float best = std::numeric_limits<float>::infinity();
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  CUDA_CHECK(cudaEventCreate(&begin));
  CUDA_CHECK(cudaEventCreate(&end));
  for (int i = 0; i <= kTimedRuns; ++i) {
    CUDA_CHECK(cudaEventRecord(begin, handle_of(stream)));
    if (run(stream, plan, algo, out, a, b, accumulate) != CUBLAS_STATUS_SUCCESS) break;
    CUDA_CHECK(cudaEventRecord(end, handle_of(stream)));
    CUDA_CHECK(cudaEventSynchronize(end));
    float ms = 0.0f;
    CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i > 0) best = std::min(best, ms);  // the first run loads code
  }
  CUDA_CHECK(cudaEventDestroy(begin));
  CUDA_CHECK(cudaEventDestroy(end));
  return best;
}

Plan make_plan(const Stream& stream, const Key& key, void* out, const void* a, const void* b) {
  Plan plan;
  const cudaDataType_t in_type = cuda_type(key.in_type);
  CUBLAS_CHECK(cublaslt().MatmulDescCreate(&plan.op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  set(plan.op, CUBLASLT_MATMUL_DESC_TRANSA, key.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan.op, CUBLASLT_MATMUL_DESC_TRANSB, key.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (key.bias) {
    set(plan.op, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(plan.op, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, in_type);
  }
  CUBLAS_CHECK(cublaslt().MatrixLayoutCreate(&plan.b, in_type, key.transpose_b ? key.k : key.n,
                                             key.transpose_b ? key.n : key.k, key.stride_b));
  CUBLAS_CHECK(cublaslt().MatrixLayoutCreate(&plan.a, in_type, key.transpose_a ? key.m : key.k,
                                             key.transpose_a ? key.k : key.m, key.stride_a));
  CUBLAS_CHECK(cublaslt().MatrixLayoutCreate(&plan.out, cuda_type(key.out_type), key.n, key.m,
                                             key.stride_out));
  cublasLtMatmulPreference_t preference = nullptr;
  CUBLAS_CHECK(cublaslt().MatmulPreferenceCreate(&preference));
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
  // A split sum is reduced in float32 in the workspace, in a fixed order; never in place.
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(key.align_b));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(key.align_a));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(key.align_out));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(key.align_out));
  std::array<cublasLtMatmulHeuristicResult_t, kCandidates> candidates{};
  int count = 0;
  const cublasStatus_t status = cublaslt().MatmulAlgoGetHeuristic(
      handle_for(key.device), plan.op, plan.b, plan.a, plan.out, plan.out, preference, kCandidates,
      candidates.data(), &count);
  CUBLAS_CHECK(cublaslt().MatmulPreferenceDestroy(preference));
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || count == 0) return plan;
  CUBLAS_CHECK(status);
  plan.found = true;
  plan.algo = candidates[0].algo;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  CUDA_CHECK(cudaStreamIsCapturing(handle_of(stream), &capture));
  if (!measure_new_shapes || count == 1 || capture != cudaStreamCaptureStatusNone) return plan;

  // Where the call accumulates, the trials must not touch its result.
  void* target = out;
  if (key.accumulate) {
    const size_t bytes = key.m * key.stride_out * size_of(key.out_type);
    CUDA_CHECK(cudaMallocAsync(&target, bytes, handle_of(stream)));
    CUDA_CHECK(cudaMemsetAsync(target, 0, bytes, handle_of(stream)));
  }
  float best = std::numeric_limits<float>::infinity();
  for (int i = 0; i < count; ++i) {
    const float ms = time_of(stream, plan, candidates[i].algo, target, a, b, key.accumulate);
    if (ms < best) {
      best = ms;
      plan.algo = candidates[i].algo;
    }
  }
  if (target != out) CUDA_CHECK(cudaFreeAsync(target, handle_of(stream)));
  return plan;
}

// For shapes that cuBLASLt refuses: a thread an element, summed in order of k.
template <typename Out, typename In>
__global__ void portable_kernel(Out* out, const In* a, const In* b, const In* bias, Key key) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t row = blockIdx.y;
  if (column >= key.n) return;
  float sum = bias == nullptr ? 0.0f : to_float(bias[column]);
  for (int64_t k = 0; k < key.k; ++k) {
    const In left = key.transpose_a ? a[k * key.stride_a + row] : a[row * key.stride_a + k];
    const In right = key.transpose_b ? b[column * key.stride_b + k] : b[k * key.stride_b + column];
    sum = fmaf(to_float(left), to_float(right), sum);
  }
  Out& to = out[row * key.stride_out + column];
  to = from_float<Out>(key.accumulate ? to_float(to) + sum : sum);
}

void run_portable(const Stream& stream, const Key& key, void* out, const void* a, const void* b,
                  const void* bias) {
  const dim3 grid(static_cast<unsigned>(ceil_div(key.n, 128)), static_cast<unsigned>(key.m));
  with_activation(key.out_type, [&](auto* out_type) {
    with_activation(key.in_type, [&](auto* in_type) {
      using Out = std::remove_pointer_t<decltype(out_type)>;
      using In = std::remove_pointer_t<decltype(in_type)>;
      portable_kernel<<<grid, 128, 0, handle_of(stream)>>>(
          static_cast<Out*>(out), static_cast<const In*>(a), static_cast<const In*>(b),
          static_cast<const In*>(bias), key);
    });
  });
  CUDA_CHECK(cudaGetLastError());
}

void multiply(const Stream& stream, TensorView out, ConstTensorView a, ConstTensorView b,
              const MatmulOptions& options, const void* bias) {
  const Key key{
      .device = stream.device.index,
      .m = out.size(0),
      .n = out.size(1),
      .k = a.size(options.transpose_a ? 0 : 1),
      .stride_out = row_stride(out),
      .stride_a = row_stride(a),
      .stride_b = row_stride(b),
      .out_type = out.dtype(),
      .in_type = a.dtype(),
      .transpose_a = options.transpose_a,
      .transpose_b = options.transpose_b,
      .accumulate = options.accumulate,
      .bias = bias != nullptr,
      .align_out = alignment(out.raw()),
      .align_a = alignment(a.raw()),
      .align_b = alignment(b.raw()),
  };
  MUSTER_CHECK(
      a.dtype() == b.dtype() && (out.dtype() == a.dtype() || out.dtype() == DType::kFloat32),
      name_of(out.dtype()));
  if (key.m == 0 || key.n == 0) return;
  if (key.k == 0) return run_portable(stream, key, out.raw(), a.raw(), b.raw(), bias);

  static std::mutex mutex;  // also guards a plan's bias pointer until its launch
  static auto& plans = *new std::map<Key, Plan>();
  std::lock_guard lock(mutex);
  auto it = plans.find(key);
  if (it == plans.end()) {
    it = plans.emplace(key, make_plan(stream, key, out.raw(), a.raw(), b.raw())).first;
  }
  const Plan& plan = it->second;
  if (!plan.found) return run_portable(stream, key, out.raw(), a.raw(), b.raw(), bias);
  if (bias != nullptr) set(plan.op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  CUBLAS_CHECK(run(stream, plan, plan.algo, out.raw(), a.raw(), b.raw(), key.accumulate));
}

}  // namespace

void set_matmul_measured(bool measured) {
  measure_new_shapes = measured;
}

void matmul(const Stream& stream, TensorView out, ConstTensorView a, ConstTensorView b,
            const MatmulOptions& options) {
  multiply(stream, out, a, b, options, nullptr);
}

void linear_forward(const Stream& stream, TensorView out, ConstTensorView x, ConstTensorView weight,
                    ConstTensorView bias) {
  multiply(stream, out, x, weight, {.transpose_b = true}, bias.raw());
}

void linear_backward(const Stream& stream, TensorView grad_x, TensorView grad_weight,
                     TensorView grad_bias, ConstTensorView grad_out, ConstTensorView x,
                     ConstTensorView weight, bool accumulate_x) {
  if (grad_x.defined()) {
    multiply(stream, grad_x, grad_out, weight, {.accumulate = accumulate_x}, nullptr);
  }
  if (grad_weight.defined()) {
    multiply(stream, grad_weight, grad_out, x, {.transpose_a = true, .accumulate = true}, nullptr);
  }
  if (grad_bias.defined()) add_column_sums(stream, grad_bias.data<float>(), grad_out);
}

}  // namespace muster::cuda
