#include "worker/worker.h"

#include <fmt/format.h>
#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <new>
#include <thread>

#include "common/error.h"
#include "common/identity.h"
#include "common/logging.h"
#include "data/text/tokenizer.h"
#include "kernels/cuda/gpu.h"
#include "worker/comm/groups.h"
#include "worker/coordinator_link.h"
#include "worker/device/compute_device.h"
#include "worker/train/memory_plan.h"
#include "worker/train/trainer.h"

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

// Trains one generation, from the coordinator's assignment to the last step. False when its
// checkpoint could not be used: the coordinator has been told and will assign anew.
bool train_generation(const Config& config, const proto::Assignment& assignment,
                      CoordinatorLink& link, DataClient& data, int local_rank) {
  const Device place = choose_device(config.run, local_rank);
  ComputeDevice device(place, choose_compute_dtype(config, place));
  device.configure(config);
  reserve_memory(device, config, assignment.rank(), assignment.world_size());
  const int64_t shard_group = shard_group_size(config.parallel, assignment.world_size());
  const auto communicator = std::make_shared<GroupedCommunicator>(
      CommunicatorOptions{.rank = assignment.rank(),
                          .world_size = assignment.world_size(),
                          .backend = config.parallel.backend,
                          .interface_name = config.parallel.interface,
                          .route_to = link.coordinator_host(),
                          .store_prefix = fmt::format("{}/", assignment.generation()),
                          .timeout_s = config.elastic.collective_timeout_s,
                          .stream = device.context().stream},
      static_cast<int>(shard_group), link);
  // Shared: the link's thread may still be aborting while this one already unwinds.
  link.on_end([communicator](const std::string& reason) { communicator->abort(reason); });
  struct Detach {
    CoordinatorLink& link;
    ~Detach() { link.on_end({}); }
  } detach{link};

  Trainer trainer(config, assignment, link, communicator->groups(), data, device);
  // Collectives that are under way must end before the buffers of the trainer go.
  struct AbortOnException {
    Communicator& communicator;
    int outer = std::uncaught_exceptions();
    ~AbortOnException() {
      if (std::uncaught_exceptions() > outer) communicator.abort("this worker leaves in mid-step");
    }
  } abort_on_exception{*communicator};
  const Trainer::Loaded loaded = trainer.load();
  proto::Envelope envelope;
  envelope.mutable_ready()->set_generation(assignment.generation());
  envelope.mutable_ready()->set_checkpoint_error(loaded.error);
  link.send(std::move(envelope));
  if (loaded.everywhere) trainer.run();
  return loaded.everywhere;
}

// Tells the coordinator why this worker cannot go on, and waits for its word. The coordinator's
// reason is the better one when a collective broke because a peer died.
int fail(CoordinatorLink& link, const proto::Assignment& assignment, const std::exception& error) {
  spdlog::error("{}", error.what());
  proto::Envelope envelope;
  auto* failed = envelope.mutable_worker_failed();
  failed->set_generation(assignment.generation());
  failed->set_rank(assignment.rank());
  failed->set_error(error.what());
  failed->set_peer(dynamic_cast<const PeerError*>(&error) != nullptr);
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
  proto::Assignment assignment;
  try {
    const Config config = resolve(link.welcome());
    use_threads(config, options.workers_on_node);
    std::unique_ptr<DataClient> data;
    const Seconds join(config.elastic.join_timeout_s);
    do {
      assignment = link.next_assignment(Deadline::after(join));
      if (!data) {
        data = std::make_unique<DataClient>(
            DataClientOptions{.endpoint = assignment.data_endpoint(),
                              .member_id = member_id,
                              .slots = static_cast<int>(config.data.prefetch) + 1,
                              .micro_batch = config.train.micro_batch,
                              .sequence_length = config.train.sequence_length},
            options.security, Deadline::after(join));
      }
    } while (!train_generation(config, assignment, link, *data, options.local_rank));
    link.wait_for_end(Deadline::after(Seconds(config.elastic.collective_timeout_s)));
  } catch (const RunEnded& ended) {
    spdlog::info("the run ended: {}", ended.what());
    return ended.exit_code();
  } catch (const std::bad_alloc&) {
    return fail(
        link, assignment,
        Error("out of memory: lower model.width, model.layers, train.micro_batch or "
              "train.sequence_length, set memory.checkpoint = \"block\", or use more workers "
              "with parallel.shard = \"full\""));
  } catch (const std::exception& error) {
    return fail(link, assignment, error);
  }
}

}  // namespace muster
