#include "worker/comm/communicator.h"

#include "common/error.h"
#include "worker/comm/gloo_communicator.h"
#include "worker/comm/nccl_communicator.h"
#include "worker/comm/single_communicator.h"

namespace muster {
namespace {

std::string choose_backend(const CommunicatorOptions& options) {
  if (options.backend != "auto") return options.backend;
  if (options.world_size == 1) return "single";
  return options.stream.device.is_cpu() ? "gloo" : "nccl";
}

class Done : public Work {
 public:
  void wait(const Stream&) override {}
};

}  // namespace

std::unique_ptr<Work> completed_work() {
  return std::make_unique<Done>();
}

void check_parcels(const std::vector<Parcel>& parcels, int rank, int world_size, Device device) {
  std::vector<bool> seen(world_size);
  for (const Parcel& parcel : parcels) {
    const int peer = parcel.peer;
    MUSTER_CHECK(peer >= 0 && peer < world_size && peer != rank, "peer " + std::to_string(peer));
    MUSTER_CHECK(!seen[peer], "two messages for peer " + std::to_string(peer));
    seen[peer] = true;
    MUSTER_CHECK(parcel.view.contiguous());
    MUSTER_CHECK(parcel.view.device() == device, "a view of another device");
  }
}

std::unique_ptr<Communicator> make_communicator(const CommunicatorOptions& options, Store& store) {
  const std::string backend = choose_backend(options);
  const bool on_cpu = options.stream.device.is_cpu();
  if (backend == "single") {
    if (options.world_size != 1) {
      throw ConfigError("parallel.backend = \"single\" is for one worker, this run has " +
                        std::to_string(options.world_size) + "; use \"auto\"");
    }
    return std::make_unique<SingleCommunicator>(options.stream);
  }
  if (backend == "gloo") {
    if (!on_cpu) {
      throw ConfigError(
          "parallel.backend = \"gloo\" is for CPUs, this run trains on GPUs; use "
          "\"auto\" or \"nccl\"");
    }
    return std::make_unique<GlooCommunicator>(options, store);
  }
  if (backend == "nccl") {
    if (on_cpu) {
      throw ConfigError(
          "parallel.backend = \"nccl\" is for GPUs, this run trains on CPUs; use "
          "\"auto\" or \"gloo\"");
    }
    return make_nccl_communicator(options, store);
  }
  throw ConfigError("parallel.backend = \"" + backend +
                    "\" is not known; use \"auto\", \"gloo\", \"nccl\" or \"single\"");
}

}  // namespace muster
