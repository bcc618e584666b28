#include "worker/comm/communicator.h"

#include "common/error.h"
#include "worker/comm/gloo_communicator.h"
#include "worker/comm/single_communicator.h"

namespace muster {

std::unique_ptr<Communicator> make_communicator(const CommunicatorOptions& options, Store& store) {
  const bool alone = options.world_size == 1;
  if (options.backend == "single" || (options.backend == "auto" && alone)) {
    if (!alone) {
      throw ConfigError("parallel.backend = \"single\" is for one worker, this run has " +
                        std::to_string(options.world_size) + "; use \"auto\" or \"gloo\"");
    }
    return std::make_unique<SingleCommunicator>();
  }
  if (options.backend == "gloo" || options.backend == "auto") {
    return std::make_unique<GlooCommunicator>(options, store);
  }
  throw ConfigError("parallel.backend = \"" + options.backend +
                    "\" is not known; use \"auto\", \"gloo\" or \"single\"");
}

}  // namespace muster
