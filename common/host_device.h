// MUSTER_HOST_DEVICE: a function that CUDA code calls on both sides; nothing elsewhere.
#pragma once

#ifdef __CUDACC__
#define MUSTER_HOST_DEVICE __host__ __device__
#else
#define MUSTER_HOST_DEVICE
#endif
