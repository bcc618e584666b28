#include "kernels/runtime/profiler_range.h"

#ifdef MUSTER_WITH_CUDA
#include <nvtx3/nvToolsExt.h>
#endif

namespace muster {

#ifdef MUSTER_WITH_CUDA
ProfilerRange::ProfilerRange(const std::string& name) {
  nvtxRangePushA(name.c_str());
}
ProfilerRange::~ProfilerRange() {
  nvtxRangePop();
}
#else
ProfilerRange::ProfilerRange(const std::string& /*name*/) {}
ProfilerRange::~ProfilerRange() {}
#endif

}  // namespace muster
