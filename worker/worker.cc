#include "worker/worker.h"

#include <fmt/format.h>
#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <new>
#include <optional>
#include <thread>

#include "common/error.h"
#include "common/identity.h"
#include "common/logging.h"
#include "data/text/tokenizer.h"
#include "kernels/cuda/gpu.h"
#include "worker/coordinator_link.h"
#include "worker/generations.h"

namespace muster {

namespace {

using Seconds = std::chrono::duration<double>;

// What this worker would compute on, as far as it can tell without the config.
std::string device_name(int local_rank) {
  const std::vector<GpuInfo> gpus = list_gpus();
  if (gpus.empty()) return "cpu";
  return gpus[std::min(static_cast<size_t>(local_rank), gpus.size() - 1)].name;
}

proto::Hello make_hello(const WorkerOptions& options, const std::string& member_id) {
  proto::Hello hello;
  hello.set_role(proto::ROLE_WORKER);
  hello.set_member_id(member_id);
  hello.set_node_id(options.node_id);
  hello.set_host(host_name());
  hello.set_pid(getpid());
  hello.set_device(device_name(options.local_rank));
  return hello;
}

Config resolve(const proto::Welcome& welcome) {
  Config config = parse_config(welcome.config_toml(), "the coordinator's config");
  config.model = resolve_model(config, make_tokenizer(config.data.tokenizer)->vocab_size());
  return config;
}

void use_threads(const Config& config, int workers_on_node) {
  const int cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  check_threads(config.parallel.threads, cores);
  const int64_t asked = config.parallel.threads;
  omp_set_num_threads(asked > 0 ? static_cast<int>(asked) : std::max(1, cores / workers_on_node));
}

// Tells the coordinator why this worker cannot go on, and waits for its word. The coordinator's
// reason is the better one when a collective broke because a peer died.
int fail(CoordinatorLink& link, const std::optional<Generations>& generations,
         const std::exception& error) {
  spdlog::error("{}", error.what());
  proto::Envelope envelope;
  auto* failed = envelope.mutable_worker_failed();
  if (generations) {
    failed->set_generation(generations->generation());
    failed->set_rank(generations->rank());
  }
  failed->set_error(error.what());
  failed->set_peer(dynamic_cast<const PeerError*>(&error) != nullptr);
  failed->set_device(dynamic_cast<const DeviceError*>(&error) != nullptr);
  link.send(std::move(envelope));
  try {
    link.wait_for_end(Deadline::after(Seconds(5)));
  } catch (const Error& ended) {
    spdlog::info("{}", ended.what());
  }
  return 1;
}

}  // namespace

void check_threads(int64_t threads, int cores) {
  constexpr int64_t kMostPerCore = 4;
  if (threads <= kMostPerCore * cores) return;
  throw ConfigError(
      fmt::format("parallel.threads: {} compute threads a worker, but {} has {} core{}: at most {} "
                  "a core; 0 lets muster choose",
                  threads, host_name(), cores, cores == 1 ? "" : "s", kMostPerCore));
}

int run_worker(const WorkerOptions& options) {
  const std::string member_id = options.member_id.empty() ? random_id() : options.member_id;
  CoordinatorLink link(options.coordinator, options.security, make_hello(options, member_id),
                       options.watch_signals, Deadline::after(Seconds(options.connect_timeout_s)));
  std::optional<Config> config;
  std::optional<Generations> generations;
  try {
    config = resolve(link.welcome());
    use_threads(*config, options.workers_on_node);
    generations.emplace(*config, member_id, options.security, options.local_rank, link);
    generations->run();
  } catch (const RunEnded& ended) {
    spdlog::info("the run ended: {}", ended.what());
    return ended.exit_code();
  } catch (const std::bad_alloc&) {
    return fail(
        link, generations,
        Error("out of memory: lower model.width, model.layers, train.micro_batch or "
              "train.sequence_length, set memory.checkpoint = \"block\", or use more workers "
              "with parallel.shard = \"full\""));
  } catch (const std::exception& error) {
    return fail(link, generations, error);
  }
}

}  // namespace muster
