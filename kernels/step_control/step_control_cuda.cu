// One thread: what it costs is the launch.
#include "kernels/cuda/vec.cuh"
#include "kernels/step_control/decide.h"

namespace muster::cuda {
namespace {

__global__ void decide_kernel(StepControl* control, const double* sums, const StepRules rules) {
  *control = decide(*control, sums, rules);
}

}  // namespace

void decide_step(const Stream& stream, TensorView control, ConstTensorView sums,
                 const StepRules& rules) {
  decide_kernel<<<1, 1, 0, handle_of(stream)>>>(static_cast<StepControl*>(control.raw()),
                                                sums.data<double>(), rules);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace muster::cuda
