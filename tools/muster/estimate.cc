// Memory before anything is allocated.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "common/config/config.h"
#include "common/error.h"
#include "data/text/tokenizer.h"
#include "kernels/runtime/runtime.h"
#include "tools/muster/command.h"
#include "tools/muster/options.h"
#include "tools/muster/workers.h"
#include "worker/train/memory_plan.h"

namespace muster {

namespace po = boost::program_options;

namespace {

double gib(size_t bytes) {
  return static_cast<double>(bytes) / (1 << 30);
}

// Whether to plan for GPUs: as --device says, else run.device, else what this machine has.
bool for_gpus(const std::string& asked, const Config& config) {
  const std::string device = asked.empty() ? config.run.device : asked;
  if (device != "auto" && device != "cpu" && device != "cuda") {
    throw UsageError("--device must be cpu, cuda or auto");
  }
  return device == "cuda" || (device == "auto" && gpu_count() > 0);
}

}  // namespace

int estimate_command(const Arguments& arguments) {
  Options options(
      "estimate CONFIG [--workers N] [--device cpu|cuda] [--set section.key=value]…",
      "Tells what memory each worker needs, by running a step without memory and arithmetic.\n"
      "Nothing is allocated, and no GPU is needed to plan for one.");
  options.positional("CONFIG");
  options.add()("workers", po::value<int>()->value_name("N")->default_value(0),
                "workers of the whole run; 0: as `muster train` would start")(
      "device", po::value<std::string>()->value_name("DEVICE")->default_value(""),
      "plan for cpu or cuda; by default run.device, or what this machine has")(
      "json", "print one JSON object")(
      "set", po::value<std::vector<std::string>>()->value_name("KEY=VALUE"),
      "override a key of the config; may be repeated");
  if (!options.parse(arguments)) return 0;

  Config config = load_config(options.required("CONFIG"), options.all("set"));
  config.model = resolve_model(config, make_tokenizer(config.data.tokenizer)->vocab_size());
  const bool gpus = for_gpus(options.get<std::string>("device"), config);
  int workers = options.get<int>("workers");
  if (workers < 0) throw UsageError("--workers must be 0 or more");
  if (workers == 0 && config.parallel.workers > 0) {
    workers = static_cast<int>(config.parallel.workers);
  }
  if (workers == 0) workers = gpus ? std::max(1, gpu_count()) : workers_of_machine(config.run);
  const DType dtype =
      gpus && config.precision.compute != "float32" ? DType::kBFloat16 : DType::kFloat32;
  MemoryPlan plan = plan_memory(config, 0, workers, dtype);
  if (!gpus) plan.scratch = plan.network = 0;  // small, and not apart from the rest of the process

  if (options.has("json")) {
    fmt::print("{}\n", nlohmann::ordered_json{{"workers", workers},
                                              {"compute", name_of(dtype)},
                                              {"state_bytes", plan.state},
                                              {"step_bytes", plan.step},
                                              {"scratch_bytes", plan.scratch},
                                              {"network_bytes", plan.network},
                                              {"total_bytes", plan.total()}}
                           .dump());
    return 0;
  }
  fmt::print("each of {} worker{}, {} on {}:\n", workers, workers == 1 ? "" : "s", name_of(dtype),
             gpus ? "GPUs" : "CPUs");
  const auto row = [](size_t bytes, const char* what) {
    fmt::print("{:9.2f} GiB  {}\n", gib(bytes), what);
  };
  row(plan.state, "weights, moments and gradient sums");
  row(plan.step, "activations, gathered weights and gradients, at the step's peak");
  if (gpus) row(plan.scratch, "kernels' scratch memory");
  if (plan.network > 0) row(plan.network, "NCCL");
  row(plan.total(), "in all");
  return 0;
}

}  // namespace muster
