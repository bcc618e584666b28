// What the GPU's matrix products add to matmul.h.
#pragma once

#include "kernels/matmul/matmul.h"

namespace muster::cuda {

// How the algorithm of a new shape is chosen. Measured (the default): cuBLASLt's candidates are
// timed when a shape is first seen, which waits for the GPU that once; the choice may differ
// between processes, and so may the last bits of the results. Not measured: the heuristic's first,
// the same in every process with this library and GPU, which deterministic runs want. A stream that
// is being captured never measures.
void set_matmul_measured(bool measured);

}  // namespace muster::cuda
