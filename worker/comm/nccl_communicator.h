// Communicator over NCCL: collectives of GPU tensors on a stream of their own, beside the one that
// computes. Host tensors and the barrier go over Gloo, whose connections also tell at once, and by
// rank, when a peer dies; NCCL itself would wait for it for ever.
#pragma once

#include <memory>
#include <string>

#include "worker/comm/communicator.h"

namespace muster {

// Meets the others through `store`; errors as make_communicator. options.stream is a CUDA stream,
// its device the current one. The destructor ends within seconds, whatever the peers do; every Work
// must be gone.
std::unique_ptr<Communicator> make_nccl_communicator(const CommunicatorOptions& options,
                                                     Store& store);

// What `muster doctor` shows. Loads NCCL.
struct NcclReport {
  std::string version;  // "2.28.9"; "" when it cannot be used
  std::string problem;  // why not, and what to do
};
NcclReport find_nccl();

}  // namespace muster
