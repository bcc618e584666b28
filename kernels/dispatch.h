// How NAME.cc hands a checked call to NAME_cpu.cc or NAME_cuda.cu: the twins have the same
// signatures in namespaces muster::cpu and muster::cuda, which NAME.cc declares with MUSTER_TWINS.
#pragma once

#include "common/check.h"
#include "common/tensor.h"

// Declares functions in both namespaces.
#define MUSTER_TWINS(...) \
  namespace cpu {         \
  __VA_ARGS__             \
  }                       \
  namespace cuda {        \
  __VA_ARGS__             \
  }

#ifdef MUSTER_WITH_CUDA
#define MUSTER_DISPATCH_CUDA(call) cuda::call
#else
#define MUSTER_DISPATCH_CUDA(call) \
  MUSTER_CHECK(false, "built without CUDA: cmake with -DMUSTER_CUDA=ON")
#endif

// Nothing is left to do on the plan device.
#define MUSTER_DISPATCH(stream, call)       \
  do {                                      \
    if ((stream).device.is_cpu()) {         \
      cpu::call;                            \
    } else if ((stream).device.is_cuda()) { \
      MUSTER_DISPATCH_CUDA(call);           \
    }                                       \
  } while (false)
