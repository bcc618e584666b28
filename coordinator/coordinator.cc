#include "coordinator/coordinator.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <chrono>
#include <filesystem>

#include "common/error.h"
#include "common/files.h"
#include "common/logging.h"
#include "common/signals.h"
#include "coordinator/checkpoints.h"
#include "coordinator/left_behind.h"
#include "coordinator/run_files.h"
#include "coordinator/run_log.h"
#include "coordinator/session.h"

namespace muster {

namespace {

double seconds(Deadline::Clock::time_point at) {
  return std::chrono::duration<double>(at.time_since_epoch()).count();
}

Deadline deadline_at(double at) {
  return Deadline(Deadline::Clock::time_point(
      std::chrono::duration_cast<Deadline::Clock::duration>(std::chrono::duration<double>(at))));
}

// Says at once what would only come out after everybody has arrived. Returns the step from which
// the run goes on, by what can be seen here, 0: from the seed.
int64_t check_run_dir(const RunDir& run, const Config& config) {
  const bool used = std::filesystem::exists(run.journal()) || !list_checkpoints(run).empty();
  if (config.run.resume == "never") {
    if (!used) return 0;
    throw ConfigError(fmt::format(
        "{} holds a run already, and run.resume is \"never\": choose another run.dir, or set "
        "run.resume to \"auto\" to go on with it",
        run.root));
  }
  const CheckpointChoice choice = choose_checkpoint(run);
  if (choice.found) {
    check_same_model(choice.manifest, run.checkpoint(choice.manifest.step), config);
  } else if (config.run.resume == "must") {
    throw CheckpointError(fmt::format(
        "{} holds no whole checkpoint, and run.resume is \"must\"{}{}", run.checkpoints(),
        choice.rejected.empty() ? "" : ": ", choice.rejected.empty() ? "" : choice.rejected[0]));
  }
  return choice.found ? choice.manifest.step : 0;
}

// A coordinator of this run directory ended without ending its run.
bool was_killed(const RunDir& run) {
  return std::filesystem::exists(run.journal()) &&
         !Journal(run.journal()).run_value("session").empty();
}

std::string lost_run_dir(const RunDir& run) {
  return fmt::format(
      "the run directory {} was removed, moved or replaced while the run went on: its metrics and "
      "checkpoints would be lost",
      run.root);
}

// Every member is a connection: thousands of them, where the system's hard limit lets them.
void allow_connections() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

// Turns signals into requests: the first asks the run to save and leave, the second to leave now.
class SignalRequests {
 public:
  explicit SignalRequests(Waker& waker) : watch_(waker) {}
  void forward(Session* session, double now) {
    const int count = watch_.interrupts() + watch_.terminations();
    const char* name = watch_.terminations() > 0 ? "SIGTERM" : "SIGINT";
    if (count > 0 && seen_ == 0) {
      session->request_stop(fmt::format("the coordinator got {}", name), false, now);
    }
    if (count > 1 && seen_ < 2) {
      session->request_stop("the coordinator got a second signal", true, now);
    }
    seen_ = count;
  }

 private:
  SignalWatch watch_;
  int seen_ = 0;
};

}  // namespace

std::string run_dir_of(const Config& config) {
  const std::string dir = config.run.dir.empty() ? "runs/" + config.run.name : config.run.dir;
  return std::filesystem::absolute(dir).lexically_normal().string();
}

std::optional<std::string> nothing_to_do(const Config& config) {
  const int64_t step = check_run_dir(RunDir{run_dir_of(config)}, config);
  if (step < config.train.steps) return std::nullopt;
  return nothing_left(step, config);
}

int run_coordinator(const CoordinatorOptions& options) {
  Config config = options.config;
  config.run.dir = run_dir_of(config);
  const RunDir run{config.run.dir};
  const RunLock lock(run);
  allow_connections();
  adopt_left_behind(run);
  const bool rejoin = options.rejoin && was_killed(run);
  if (const auto reason = rejoin ? std::nullopt : nothing_to_do(config)) {
    spdlog::info("{}", *reason);
    return 0;
  }
  make_dirs(run.checkpoints());
  remove_partials(run);
  const Security security = run_security(run, options.listen, options.security);
  Server server(options.listen, security, {.heartbeat_s = config.elastic.heartbeat_s});
  const TokenFile token(run);
  RunLog log(run, config.metrics.debug_samples);
  log.set_run("name", config.run.name);

  Waker waker;
  std::optional<SignalRequests> signals;
  if (options.handle_signals) signals.emplace(waker);
  const int workers = options.expected_workers > 0 ? options.expected_workers
                                                   : static_cast<int>(config.parallel.workers);
  Session session(
      config,
      {.expected_workers = workers,
       .resume_command = options.resume_command,
       .run_token = token.token()},
      &log,
      [&](const std::string& peer, const Message& message) { return server.send(peer, message); },
      seconds(Deadline::Clock::now()));
  if (rejoin) session.restore(seconds(Deadline::Clock::now()));
  const std::string endpoint = reachable_endpoint(server.endpoint());
  const EndpointFile endpoint_file(run, endpoint);
  spdlog::info("run {} in {} listens on {}", config.run.name, run.root, server.endpoint());
  if (options.on_listening) options.on_listening(endpoint);

  double next_look = 0.0;  // at the run directory
  while (!session.over()) {
    auto received = server.receive(deadline_at(session.next_tick()), &waker);
    waker.clear();
    const double now = seconds(Deadline::Clock::now());
    if (received) session.handle(received->peer, received->envelope, now);
    if (signals) signals->forward(&session, now);
    if (now >= next_look) {
      next_look = now + config.elastic.heartbeat_s;
      if (!lock.in_place()) session.abandon(lost_run_dir(run), now);
    }
    session.tick(now);
  }
  remove_partials(run);
  const Outcome& outcome = *session.outcome();
  if (outcome.ok) {
    spdlog::info("{}", outcome.reason);
  } else {
    spdlog::error("{}", outcome.reason);
  }
  return outcome.ok ? 0 : 1;
}

}  // namespace muster
