// A named stretch of a thread's work, as profilers of NVIDIA's show it (NVTX). Costs nothing when
// none is attached, and does nothing in builds without CUDA.
#pragma once

#include <string>

namespace muster {

class ProfilerRange {
 public:
  explicit ProfilerRange(const std::string& name);
  ~ProfilerRange();
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;
};

}  // namespace muster
