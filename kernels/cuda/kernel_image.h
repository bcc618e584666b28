// Whether this program holds code for the current GPU's architecture.
#pragma once

namespace muster::cuda {

bool has_kernel_image();

}  // namespace muster::cuda
