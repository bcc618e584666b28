// NCCL, loaded by the first communicator that needs it: 200 megabytes that a host without GPU, or
// a run with one, should not have to find. Only for sources of builds with MUSTER_WITH_NCCL.
#pragma once

#include <nccl.h>

#include <string>

namespace muster {

// The functions in use, under their own names without the prefix.
struct Nccl {
  decltype(&::ncclGetVersion) GetVersion;
  decltype(&::ncclGetUniqueId) GetUniqueId;
  decltype(&::ncclCommInitRankConfig) CommInitRankConfig;
  decltype(&::ncclCommFinalize) CommFinalize;
  decltype(&::ncclCommAbort) CommAbort;
  decltype(&::ncclCommGetAsyncError) CommGetAsyncError;
  decltype(&::ncclGetErrorString) GetErrorString;
  decltype(&::ncclGetLastError) GetLastError;
  decltype(&::ncclAllGather) AllGather;
  decltype(&::ncclReduceScatter) ReduceScatter;
  decltype(&::ncclAllReduce) AllReduce;
  decltype(&::ncclSend) Send;
  decltype(&::ncclRecv) Recv;
  decltype(&::ncclGroupStart) GroupStart;
  decltype(&::ncclGroupEnd) GroupEnd;
  int version;  // as NCCL_VERSION_CODE
};

// Throws Error, with what was tried, where the library or a function is missing or too old.
const Nccl& nccl();

// 22809 → "2.28.9".
std::string nccl_version_name(int version);

}  // namespace muster
