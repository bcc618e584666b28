#include "tools/muster/workers.h"

#include <fmt/format.h>

#include <algorithm>

#include "common/error.h"
#include "kernels/runtime/runtime.h"
#include "worker/agent/agent.h"

namespace muster {

int workers_of_machine(const RunConfig& run) {
  const int gpus = run.device == "cpu" ? 0 : gpu_count();
  return gpus > 0 ? gpus : default_workers();
}

int workers_for_run(const Config& config) {
  const int gpus = config.run.device == "cpu" ? 0 : gpu_count();
  if (config.run.device == "cuda" && gpus == 0) {
    throw ConfigError(
        "run.device: \"cuda\", but no GPU can be used here (`muster doctor` says why); use "
        "\"auto\" "
        "or \"cpu\"");
  }
  const int64_t asked = config.parallel.workers;
  if (gpus > 0 && asked > gpus) {
    throw ConfigError(fmt::format(
        "parallel.workers: {} workers, but this machine has {} GPUs and each worker takes one; ask "
        "for fewer, or set run.device = \"cpu\"",
        asked, gpus));
  }
  if (asked > 0) return static_cast<int>(asked);
  if (config.parallel.backend == "single") return 1;
  return static_cast<int>(
      std::min<int64_t>(workers_of_machine(config.run), config.train.global_batch));
}

}  // namespace muster
