// Tensor maps of the Hopper attention kernels.
#include <cudaTypedefs.h>

#include <string>

#include "kernels/attention/attention_hopper.cuh"

namespace muster::cuda::hopper {
namespace {

// The driver's encoder; the program links no driver library, as it also runs without one.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto encode = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult found{};
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000,
                                                cudaEnableDefault, &found));
    MUSTER_CHECK(found == cudaDriverEntryPointSuccess);
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(pointer);
  }();
  return encode;
}

CUtensorMap encode(CUtensorMapDataType type, void* data, const cuuint64_t (&sizes)[3],
                   const cuuint64_t (&strides)[2], const cuuint32_t (&box)[3]) {
  CUtensorMap map;
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult status =
      encoder()(&map, type, 3, data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  MUSTER_CHECK(status == CUDA_SUCCESS, "cuTensorMapEncodeTiled: " + std::to_string(status));
  return map;
}

}  // namespace

CUtensorMap head_map(const HeadView& view, int64_t tokens, int heads, int width, int rows) {
  const auto bytes = [](int64_t elements) { return static_cast<cuuint64_t>(elements) * 2; };
  // A dimension of size 1 may have any stride; the map wants a valid one.
  const cuuint64_t head = bytes(heads > 1 ? view.head : width);
  const cuuint64_t row = bytes(tokens > 1 ? view.row : width);
  return encode(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, view.data,
                {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(heads),
                 static_cast<cuuint64_t>(tokens)},
                {head, row}, {kPanel, 1, static_cast<cuuint32_t>(rows)});
}

CUtensorMap float_map(float* data, int64_t outer, int64_t middle, int64_t inner, int rows) {
  const auto row = static_cast<cuuint64_t>(inner) * sizeof(float);
  return encode(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, data,
                {static_cast<cuuint64_t>(inner), static_cast<cuuint64_t>(middle),
                 static_cast<cuuint64_t>(outer)},
                {row, row * static_cast<cuuint64_t>(middle)},
                {32, static_cast<cuuint32_t>(rows), 1});
}

}  // namespace muster::cuda::hopper
