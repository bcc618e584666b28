// What is left of fp8.h for the GPU alone.
#pragma once

namespace muster::cuda {

bool fp8_supported(int device);

}  // namespace muster::cuda
