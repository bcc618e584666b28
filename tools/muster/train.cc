#include <fmt/format.h>

#include <algorithm>
#include <thread>

#include "common/config/config.h"
#include "common/error.h"
#include "data/text/tokenizer.h"
#include "tools/muster/command.h"
#include "tools/muster/format.h"
#include "tools/muster/local_run.h"
#include "tools/muster/options.h"
#include "tools/muster/workers.h"
#include "worker/worker.h"

namespace muster {

namespace po = boost::program_options;

int train_command(const Arguments& arguments) {
  Options options(
      "train CONFIG [--workers N] [--set section.key=value]…",
      "Trains on this machine: starts a coordinator, a data service and workers, and shows their\n"
      "progress. The same command again goes on from the newest checkpoint.\n"
      "Ctrl-C once: finish the step, save, leave; twice: leave now.");
  options.positional("CONFIG");
  options.add()(
      "workers", po::value<int>()->value_name("N")->default_value(0),
      "worker processes; 0: parallel.workers, or where that is 0 too one per GPU, or per two CPU "
      "cores on a machine without")("set",
                                    po::value<std::vector<std::string>>()->value_name("KEY=VALUE"),
                                    "override a key of the config; may be repeated");
  options.add_epilogue("keys of the config, with their defaults:\n" + describe_config());
  if (!options.parse(arguments)) return 0;

  LocalRunOptions run;
  run.config_path = options.required("CONFIG");
  run.overrides = options.all("set");
  const int asked = options.get<int>("workers");
  if (asked < 0) throw UsageError("--workers must be 0 or more");
  if (asked > 0) run.overrides.push_back(fmt::format("parallel.workers={}", asked));
  run.config = load_config(run.config_path, run.overrides);
  resolve_model(run.config, make_tokenizer(run.config.data.tokenizer)->vocab_size());
  if (run.config.data.sources.empty()) {
    throw ConfigError(run.config_path +
                      ": data.sources: is empty, name the files or folders to train on");
  }
  check_threads(run.config.parallel.threads,
                static_cast<int>(std::max(1U, std::thread::hardware_concurrency())));
  run.workers = workers_for_run(run.config);
  run.security = options.security();
  run.resume_command = command_line("train", arguments);
  return run_locally(run);
}

}  // namespace muster
