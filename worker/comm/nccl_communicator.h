// Communicator over NCCL: collectives of GPU tensors on a stream of their own, beside the one that
// computes. Host tensors and the barrier go over Gloo, whose connections also tell at once, and by
// rank, when a peer dies; NCCL itself would wait for it for ever.
#pragma once

#include <memory>
#include <string>

#include "worker/comm/communicator.h"

namespace muster {

// Does beforehand what takes half a second of a process's first communicator and is kept for all
// later ones: loads NCCL, makes a communicator of one rank on the current device and aborts it.
// `interface_name` and `route_to` are those of the CommunicatorOptions to come, because NCCL
// chooses its network interface here, once for the process. May set NCCL_SOCKET_IFNAME: call it
// before other threads read the environment. Blocks for as long as that takes, of the communicator
// up to 10 s. Throws nothing: what is wrong with NCCL is told when a communicator is made. Does
// nothing in builds without NCCL.
void warm_up_nccl(const std::string& interface_name, const std::string& route_to) noexcept;

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
