// How NAME.cc hands a checked call to NAME_cpu.cc or NAME_cuda.cu: the twins have the same
// signature in namespaces muster::cpu and muster::cuda, declared at the top of NAME.cc. An op
// without a NAME_cuda.cu uses MUSTER_DISPATCH_CPU, also in a build with CUDA; its .cu comes
// together with the change to MUSTER_DISPATCH.
#pragma once

#include "common/check.h"
#include "common/tensor.h"

#define MUSTER_DISPATCH_CPU(stream, call)                                         \
  do {                                                                            \
    MUSTER_CHECK((stream).device.is_cpu(), "no GPU version of this op is built"); \
    cpu::call;                                                                    \
  } while (false)

#ifdef MUSTER_WITH_CUDA
#define MUSTER_DISPATCH(stream, call) \
  do {                                \
    if ((stream).device.is_cpu()) {   \
      cpu::call;                      \
    } else {                          \
      cuda::call;                     \
    }                                 \
  } while (false)
#else
#define MUSTER_DISPATCH(stream, call) MUSTER_DISPATCH_CPU(stream, call)
#endif
