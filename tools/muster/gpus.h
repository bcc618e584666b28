// The GPUs of this machine as its driver reports them, found without linking against it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace muster {

struct Gpu {
  std::string name;
  int64_t memory_bytes = 0;
};

struct GpuReport {
  std::vector<Gpu> gpus;
  std::string driver;   // version; "" when there is no driver
  std::string problem;  // why the driver cannot be used; "" when there is none or it works
};

GpuReport find_gpus();

}  // namespace muster
