// Plans of products: one a shape, chosen by timing what cuBLASLt proposes, kept for the life of the
// process.
#include <algorithm>
#include <array>
#include <atomic>
#include <compare>
#include <functional>
#include <limits>
#include <map>
#include <mutex>

#include "kernels/cuda/device.h"
#include "kernels/cuda/vec.cuh"
#include "kernels/matmul/cublaslt.h"
#include "kernels/matmul/matmul.h"
#include "kernels/matmul/product_cuda.h"

namespace muster::cuda {
namespace {

// Of cuBLASLt's scratch memory; 32 MiB is what NVIDIA recommends for Hopper.
constexpr size_t kWorkspaceBytes = 32 << 20;
constexpr int kCandidates = 8;  // as many as it proposes
constexpr int kTimedRuns = 3;
// A candidate whose first run is this much slower than the best so far is not run again.
constexpr float kHopeless = 1.1f;
constexpr size_t kFlushBytes = 128 << 20;  // more than the L2 cache of any GPU
constexpr float kNever = std::numeric_limits<float>::infinity();

std::atomic<bool> measure_new_shapes{true};

// One matrix, as far as an algorithm's choice depends on it.
struct MatrixKey {
  DType dtype = DType::kFloat32;
  int64_t stride = 0;
  uint32_t alignment = 0;  // 0: there is none
  auto operator<=>(const MatrixKey&) const = default;
};

struct Key {
  int device;
  int64_t m, n, k;
  MatrixKey out, a, b, addend, hidden;
  bool transpose_a, transpose_b, bias, in_place, scaled, fast_accumulate;
  Epilogue epilogue;
  auto operator<=>(const Key&) const = default;
};

// cuBLASLt is column-major: out^T = op(b)^T · op(a)^T, so its A is our b and its B our a.
struct Plan {
  bool found = false;  // cuBLASLt has no kernel for some shapes
  cublasLtMatmulDesc_t op = nullptr;
  cublasLtMatrixLayout_t a = nullptr;
  cublasLtMatrixLayout_t b = nullptr;
  cublasLtMatrixLayout_t addend = nullptr;
  cublasLtMatrixLayout_t out = nullptr;
  cublasLtMatmulAlgo_t algo{};
};

cudaDataType_t cuda_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return CUDA_R_32F;
    case DType::kBFloat16:
      return CUDA_R_16BF;
    case DType::kFloat8E4M3:
      return CUDA_R_8F_E4M3;
    case DType::kFloat8E5M2:
      return CUDA_R_8F_E5M2;
    default:
      MUSTER_CHECK(false, name_of(dtype));
  }
}

// The largest power of two up to 256 that divides the address.
uint32_t alignment(const void* p) {
  const auto address = reinterpret_cast<uintptr_t>(p) | 256;
  return static_cast<uint32_t>(address & (~address + 1));
}

MatrixKey key_of(const ConstTensorView& view) {
  if (!view.defined()) return {};
  return {view.dtype(), std::max(view.size(0) > 1 ? view.stride(0) : 0, view.size(1)),
          alignment(view.raw())};
}

Key key_of(const Stream& stream, const Product& product) {
  return {.device = stream.device.index,
          .m = product.out.size(0),
          .n = product.out.size(1),
          .k = product.a.size(product.transpose_a ? 0 : 1),
          .out = key_of(product.out),
          .a = key_of(product.a),
          .b = key_of(product.b),
          .addend = key_of(product.addend),
          .hidden = key_of(product.hidden),
          .transpose_a = product.transpose_a,
          .transpose_b = product.transpose_b,
          .bias = product.bias != nullptr,
          .in_place = product.addend.raw() == product.out.raw(),
          .scaled = product.scale_a != nullptr,
          .fast_accumulate = product.fast_accumulate,
          .epilogue = product.epilogue};
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

cublasLtEpilogue_t epilogue_of(const Key& key) {
  switch (key.epilogue) {
    case Epilogue::kGelu:
      return key.bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    case Epilogue::kGeluBackward:
      return CUBLASLT_EPILOGUE_DGELU;
    default:
      return key.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
  }
}

cublasLtMatrixLayout_t make_layout(const MatrixKey& matrix, int64_t rows, int64_t columns) {
  cublasLtMatrixLayout_t layout = nullptr;
  CUBLAS_CHECK(cublaslt().MatrixLayoutCreate(&layout, cuda_type(matrix.dtype), columns, rows,
                                             matrix.stride));
  return layout;
}

Plan describe(const Key& key) {
  Plan plan;
  CUBLAS_CHECK(cublaslt().MatmulDescCreate(&plan.op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  set(plan.op, CUBLASLT_MATMUL_DESC_TRANSA, key.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan.op, CUBLASLT_MATMUL_DESC_TRANSB, key.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan.op, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(key));
  if (key.bias) set(plan.op, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, cuda_type(key.out.dtype));
  if (key.epilogue != Epilogue::kNone) {
    set(plan.op, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, key.hidden.stride);
  }
  if (key.fast_accumulate) set(plan.op, CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{1});
  plan.b = make_layout(key.b, key.transpose_b ? key.n : key.k, key.transpose_b ? key.k : key.n);
  plan.a = make_layout(key.a, key.transpose_a ? key.k : key.m, key.transpose_a ? key.m : key.k);
  plan.out = make_layout(key.out, key.m, key.n);
  plan.addend = make_layout(key.addend.alignment != 0 ? key.addend : key.out, key.m, key.n);
  return plan;
}

// Hands the plan this call's addresses.
void point_at(const Plan& plan, const Product& product) {
  if (product.bias != nullptr) set(plan.op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, product.bias);
  if (product.epilogue != Epilogue::kNone) {
    set(plan.op, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, product.hidden.raw());
  }
  if (product.scale_a != nullptr) {
    set(plan.op, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, product.scale_b);
    set(plan.op, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, product.scale_a);
  }
}

cublasStatus_t run(const Stream& stream, const Plan& plan, const cublasLtMatmulAlgo_t& algo,
                   const Product& product, void* out) {
  const float one = 1.0f;
  const float beta = product.addend.defined() ? 1.0f : 0.0f;
  const void* addend = product.addend.defined() ? product.addend.raw() : out;
  return cublaslt().Matmul(handle_for(stream.device.index), plan.op, &one, product.b.raw(), plan.b,
                           product.a.raw(), plan.a, &beta, addend, plan.addend, out, plan.out,
                           &algo, workspace(stream, Scratch::kMatmul, kWorkspaceBytes),
                           kWorkspaceBytes, handle_of(stream));
}

__global__ void flush_kernel(const uint4* data, int64_t n, uint32_t* out) {
  uint32_t sum = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; i < n;
       i += static_cast<int64_t>(gridDim.x) * 256) {
    sum += data[i].x;
  }
  if (sum == 0x12345678u) *out = sum;  // never, as the data are zeros; keeps the loads
}

// Memory for the length of a measurement; without it (the GPU is full) there is none.
class TrialMemory {
 public:
  TrialMemory(const Stream& stream, size_t bytes) : stream_(stream) {
    if (cudaMallocAsync(&data_, bytes, handle_of(stream)) != cudaSuccess) {
      cudaGetLastError();
      data_ = nullptr;
      return;
    }
    CUDA_CHECK(cudaMemsetAsync(data_, 0, bytes, handle_of(stream)));
  }
  ~TrialMemory() {
    if (data_ != nullptr) cudaFreeAsync(data_, handle_of(stream_));
  }
  TrialMemory(const TrialMemory&) = delete;
  TrialMemory& operator=(const TrialMemory&) = delete;
  void* data() const { return data_; }

 private:
  Stream stream_;
  void* data_ = nullptr;
};

// Times calls on a cold L2 cache.
class Stopwatch {
 public:
  explicit Stopwatch(const Stream& stream) : stream_(stream), flush_(stream, kFlushBytes) {
    CUDA_CHECK(cudaEventCreate(&begin_));
    CUDA_CHECK(cudaEventCreate(&end_));
  }
  ~Stopwatch() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  // Milliseconds of the fastest of a few runs; infinity where `call` says false. Where the first
  // run is far above `to_beat`, it stays the only one.
  float best_ms(float to_beat, const std::function<bool()>& call) {
    float best = kNever;
    for (int i = 0; i <= kTimedRuns; ++i) {
      if (flush_.data() != nullptr) {
        auto* data = static_cast<uint4*>(flush_.data());
        flush_kernel<<<512, 256, 0, handle_of(stream_)>>>(data, kFlushBytes / sizeof(uint4),
                                                          reinterpret_cast<uint32_t*>(data));
        CUDA_CHECK(cudaGetLastError());
      }
      CUDA_CHECK(cudaEventRecord(begin_, handle_of(stream_)));
      if (!call()) return kNever;
      CUDA_CHECK(cudaEventRecord(end_, handle_of(stream_)));
      CUDA_CHECK(cudaEventSynchronize(end_));
      float ms = 0.0f;
      CUDA_CHECK(cudaEventElapsedTime(&ms, begin_, end_));
      if (i == 0) continue;  // loads code
      best = std::min(best, ms);
      if (i == 1 && ms > kHopeless * to_beat) break;
    }
    return best;
  }

 private:
  Stream stream_;
  TrialMemory flush_;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

bool may_measure(const Stream& stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  CUDA_CHECK(cudaStreamIsCapturing(handle_of(stream), &capture));
  return measure_new_shapes && capture == cudaStreamCaptureStatusNone;
}

Plan make_plan(const Stream& stream, const Key& key, const Product& product) {
  Plan plan = describe(key);
  cublasLtMatmulPreference_t preference = nullptr;
  CUBLAS_CHECK(cublaslt().MatmulPreferenceCreate(&preference));
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
  // A split sum is reduced in float32 in the workspace, in a fixed order; never in place.
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  const uint32_t addend = key.addend.alignment != 0 ? key.addend.alignment : key.out.alignment;
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.b.alignment);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.a.alignment);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, addend);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.out.alignment);
  point_at(plan, product);
  std::array<cublasLtMatmulHeuristicResult_t, kCandidates> candidates{};
  int count = 0;
  const cublasStatus_t status = cublaslt().MatmulAlgoGetHeuristic(
      handle_for(key.device), plan.op, plan.b, plan.a, plan.addend, plan.out, preference,
      kCandidates, candidates.data(), &count);
  CUBLAS_CHECK(cublaslt().MatmulPreferenceDestroy(preference));
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE ||
      count == 0) {
    return plan;
  }
  CUBLAS_CHECK(status);
  plan.found = true;
  plan.algo = candidates[0].algo;
  if (count == 1 || !may_measure(stream)) return plan;

  // Where the result is also an input, trials write elsewhere.
  const size_t bytes = key.m * key.out.stride * size_of(key.out.dtype);
  const TrialMemory elsewhere(stream, key.in_place ? bytes : 1);
  if (elsewhere.data() == nullptr) return plan;
  void* out = key.in_place ? elsewhere.data() : product.out.raw();
  Stopwatch watch(stream);
  float best = kNever;
  for (int i = 0; i < count; ++i) {
    const float ms = watch.best_ms(best, [&] {
      return run(stream, plan, candidates[i].algo, product, out) == CUBLAS_STATUS_SUCCESS;
    });
    if (ms < best) {
      best = ms;
      plan.algo = candidates[i].algo;
    }
  }
  return plan;
}

}  // namespace

void set_matmul_measured(bool measured) {
  measure_new_shapes = measured;
}

bool multiply(const Stream& stream, const Product& product) {
  const Key key = key_of(stream, product);
  static std::mutex mutex;  // also guards a plan's pointers until its launch
  static auto& plans = *new std::map<Key, Plan>();
  std::lock_guard lock(mutex);
  auto it = plans.find(key);
  if (it == plans.end()) it = plans.emplace(key, make_plan(stream, key, product)).first;
  const Plan& plan = it->second;
  if (!plan.found) return false;
  point_at(plan, product);
  CUBLAS_CHECK(run(stream, plan, plan.algo, product, product.out.raw()));
  return true;
}

bool fused_pays(const Stream& stream, const Product& product,
                bool (*fused)(const Stream&, const Product&),
                bool (*parts)(const Stream&, const Product&)) {
  const Key key = key_of(stream, product);
  static std::mutex mutex;
  static auto& choices = *new std::map<Key, bool>();
  std::lock_guard lock(mutex);
  if (const auto it = choices.find(key); it != choices.end()) return it->second;
  if (!may_measure(stream)) return true;
  Stopwatch watch(stream);
  const float fused_ms = watch.best_ms(kNever, [&] { return fused(stream, product); });
  const float parts_ms = watch.best_ms(kNever, [&] { return parts(stream, product); });
  return choices[key] = fused_ms < parts_ms;
}

}  // namespace muster::cuda
