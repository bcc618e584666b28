#include "worker/agent/agent.h"

#include <fmt/format.h>
#include <sched.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <filesystem>
#include <iostream>
#include <map>
#include <optional>
#include <sstream>
#include <thread>

#include "common/config/config.h"
#include "common/error.h"
#include "common/files.h"
#include "common/identity.h"
#include "common/process.h"
#include "common/protocol/heartbeat.h"
#include "common/run_dir.h"
#include "common/signals.h"
#include "worker/agent/node_processes.h"
#include "worker/agent/restart_policy.h"

namespace muster {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr size_t kExitsKept = 64;
// Between SIGTERM and SIGKILL of children that were to end by themselves and did not.
constexpr Seconds kLastGrace(1.0);

// The policy's clock.
double now_s() {
  return Seconds(Deadline::Clock::now().time_since_epoch()).count();
}

// Writes the last lines of a failed process's log into ours: what it could not tell anybody (a
// CHECK, the loader's complaint) is there.
void quote_log(const NodeExit& exit) {
  constexpr uint64_t kMostBytes = 2000;
  try {
    // What its predecessor wrote there is another story.
    std::error_code missing;
    const uint64_t size = std::filesystem::file_size(exit.log, missing);
    if (missing || size <= exit.log_begin) return;
    std::istringstream tail(read_file_tail(exit.log, std::min(kMostBytes, size - exit.log_begin)));
    for (std::string line; std::getline(tail, line);) {
      std::cerr << kQuotedLogPrefix << line << '\n';
    }
  } catch (const IoError& error) {
    spdlog::warn("{}", error.what());
  }
}

class Agent {
 public:
  explicit Agent(const AgentOptions& options);
  int run();

 private:
  proto::Envelope make_hello() const;
  proto::NodeLoad load() const;
  proto::Welcome join();
  void check_shares_run_dir(const proto::Welcome& welcome);
  void send(proto::Envelope envelope);
  Deadline next_deadline() const;
  void beat();
  void take(const proto::Envelope& envelope);
  void take_stop(const proto::Stop& stop);
  void give_up_coordinator();
  void report_exits();
  RestartDecision decide_restart(const NodeExit& exit);
  void plan_workers(int count);
  void start_due();
  int workers_wanted() const;
  void heed_signals();
  bool finished();

  const AgentOptions options_;
  const std::string node_id_ = random_id();
  Client client_;
  const proto::Welcome welcome_;
  // From here on signals are heeded; before, they end the process, which has nothing to clean up.
  Waker waker_;
  SignalWatch signals_{waker_, /*children=*/true};
  const Seconds heartbeat_;
  const Seconds patience_;  // with a silent coordinator, which may be started anew
  const ElasticConfig elastic_;
  Deadline next_heartbeat_ = Deadline::now();
  Deadline silence_;
  NodeProcesses processes_;
  RestartPolicy policy_;
  struct Due {
    double at = 0.0;         // now_s()
    bool set_aside = false;  // it waits for the end of a cool-down
  };
  std::map<int, Due> due_;  // what is to be started, by slot
  int asked_ = 0;           // by all StartWorkers

  std::deque<proto::Envelope> reported_;  // the last exits, for a coordinator that is started anew
  int signals_seen_ = 0;                  // once there are some, this node leaves
  std::optional<proto::Stop> stop_;
  // Set once the node is to end: when whatever still runs is killed.
  std::optional<Deadline> end_by_;
  // Set while there is nothing left to watch: how long the coordinator's word is awaited.
  std::optional<Deadline> word_by_;
};

std::string make_log_dir(const std::string& run_dir) {
  std::string logs = RunDir{run_dir}.logs();
  make_dirs(logs);
  return logs;
}

Agent::Agent(const AgentOptions& options)
    : options_(options),
      client_(options.coordinator, options.security, "the coordinator"),
      welcome_(join()),
      heartbeat_(welcome_.heartbeat_s()),
      patience_(patience_s(welcome_, welcome_.heartbeat_s())),
      elastic_(parse_config(welcome_.config_toml(), "the coordinator's config").elastic),
      silence_(Deadline::after(patience_)),
      processes_({.program = options.program.empty() ? own_program() : options.program,
                  .coordinator = options.coordinator,
                  .security = options.security,
                  .node_id = node_id_,
                  .log_dir = make_log_dir(welcome_.run_dir())}),
      policy_({.restarts = elastic_.restarts,
               .window_s = elastic_.restart_window_s,
               .cool_down_s = elastic_.cool_down_s}) {
  processes_.start(kDataSlot, options_.workers);
  for (int i = 0; i < options_.workers; ++i) processes_.start(i, options_.workers);
}

proto::Envelope Agent::make_hello() const {
  proto::Envelope envelope;
  proto::Hello* hello = envelope.mutable_hello();
  hello->set_role(proto::ROLE_NODE);
  hello->set_member_id(node_id_);
  hello->set_node_id(node_id_);
  hello->set_host(host_name());
  hello->set_pid(::getpid());
  hello->set_workers(options_.workers);
  return envelope;
}

proto::NodeLoad Agent::load() const {
  proto::NodeLoad load;
  const auto waits = std::count_if(due_.begin(), due_.end(), [](const auto& entry) {
    return entry.first != kDataSlot && entry.second.set_aside;
  });
  load.set_workers(workers_wanted() - static_cast<int>(waits));
  load.set_asked(asked_);
  return load;
}

proto::Welcome Agent::join() {
  const proto::Envelope reply =
      client_.call(make_hello(), Deadline::after(Seconds(options_.connect_timeout_s)));
  if (!reply.has_welcome()) {
    throw PeerError(
        fmt::format("the coordinator at {} answered Hello with something else than Welcome",
                    options_.coordinator));
  }
  check_shares_run_dir(reply.welcome());
  return reply.welcome();
}

// Throws PeerError, after telling the coordinator to do without us, where the coordinator's token
// does not lie in the run directory. Waits a little for it: network file systems may be late.
void Agent::check_shares_run_dir(const proto::Welcome& welcome) {
  constexpr Seconds kPatience(5.0);
  constexpr std::chrono::milliseconds kInterval(50);
  const auto tell = [&](proto::Envelope envelope) {
    client_.send(std::move(envelope), Deadline::after(Seconds(options_.connect_timeout_s)));
  };
  if (welcome.run_token().empty()) return;
  const RunDir run{welcome.run_dir()};
  const Deadline deadline = Deadline::after(kPatience);
  Deadline next_beat = Deadline::after(Seconds(welcome.heartbeat_s()));
  while (!deadline.passed()) {
    try {
      if (read_file(run.token()) == welcome.run_token()) return;
    } catch (const IoError&) {
      // Not there, or not readable: to us that is the same.
    }
    proto::Envelope beat;
    beat.mutable_heartbeat();
    if (next_beat.passed()) {
      tell(std::move(beat));
      next_beat = Deadline::after(Seconds(welcome.heartbeat_s()));
    }
    std::this_thread::sleep_for(kInterval);
  }
  const std::string reason = fmt::format(
      "{} does not share the run directory {} with the coordinator (what is in {} is not the "
      "coordinator's): RUN_DIR must be on a file system that all nodes have at the same path; set "
      "run.dir to one",
      host_name(), run.root, run.token());
  proto::Envelope withdrawn;
  withdrawn.mutable_withdrawn()->set_reason(reason);
  tell(std::move(withdrawn));
  throw PeerError(reason);
}

void Agent::send(proto::Envelope envelope) {
  client_.send(std::move(envelope), Deadline::after(kMissedHeartbeats * heartbeat_));
}

int Agent::run() {
  // Starting the processes took a while in which nobody listened: that is not the coordinator's.
  silence_ = Deadline::after(patience_);
  while (true) {
    beat();
    heed_signals();
    report_exits();
    start_due();
    if (finished()) return stop_ && stop_->ok() ? 0 : 1;
    const auto envelope = client_.receive(next_deadline(), &waker_);
    waker_.clear();
    if (envelope) {
      silence_ = Deadline::after(patience_);
      take(*envelope);
    } else if (silence_.passed() && !stop_) {
      give_up_coordinator();
    }
  }
}

// When there is something to do without a message or an exit. After Stop the end alone is left.
Deadline Agent::next_deadline() const {
  if (stop_) return *end_by_;
  Deadline next = next_heartbeat_.earlier(silence_);
  if (end_by_) next = next.earlier(*end_by_);
  if (word_by_) next = next.earlier(*word_by_);
  const double now = now_s();
  for (const auto& [slot, due] : due_) {
    next = next.earlier(Deadline::after(Seconds(due.at - now)));
  }
  return next;
}

void Agent::beat() {
  // After Stop the coordinator may be gone already.
  if (stop_ || !next_heartbeat_.passed()) return;
  proto::Envelope envelope;
  *envelope.mutable_heartbeat()->mutable_load() = load();
  send(std::move(envelope));
  next_heartbeat_ = Deadline::after(heartbeat_);
}

void Agent::take(const proto::Envelope& envelope) {
  if (!envelope.has_hello_again()) {
    for (proto::Envelope& exit : reported_) exit.mutable_process_exited()->set_told(true);
  }
  switch (envelope.body_case()) {
    case proto::Envelope::kStop:
      take_stop(envelope.stop());
      break;
    case proto::Envelope::kStartWorkers:
      plan_workers(envelope.start_workers().count());
      break;
    case proto::Envelope::kEndProcess:
      processes_.kill(envelope.end_process().member_id(), envelope.end_process().reason());
      break;
    case proto::Envelope::kHelloAgain:
      // One that comes too late shall not count on this node.
      if (stop_) break;
      {
        proto::Envelope hello = make_hello();
        *hello.mutable_hello()->mutable_load() = load();
        send(std::move(hello));
      }
      for (const proto::Envelope& exit : reported_) send(exit);
      break;
    default:
      break;  // a heartbeat
  }
}

void Agent::take_stop(const proto::Stop& stop) {
  stop_ = stop;
  spdlog::info("told to leave: {}", stop.reason());
  for (const std::string& id : stop.silent()) processes_.kill(id, "it does not answer");
  due_.clear();
  // Each of the others hears of it by itself, and ends by itself.
  end_by_ = Deadline::after(Seconds(elastic_.shutdown_timeout_s));
}

// Without a coordinator nothing that the workers do can be committed. Each of them notices by
// itself, and saves what it has.
void Agent::give_up_coordinator() {
  spdlog::error("the coordinator at {} has been silent for {:.1f} s: this node's processes end",
                options_.coordinator, patience_.count());
  stop_.emplace();
  due_.clear();
  end_by_ = Deadline::after(Seconds(elastic_.collective_timeout_s));
}

void Agent::report_exits() {
  for (const NodeExit& exit : processes_.take_exits()) {
    const auto level = exit.status.ok() ? spdlog::level::info : spdlog::level::err;
    spdlog::log(level, "{} (pid {}) {}", exit.name, exit.pid, exit.status.to_string());
    if (stop_) continue;
    if (!exit.status.ok()) quote_log(exit);
    const RestartDecision decision = decide_restart(exit);
    const bool soon = decision.start_at && decision.set_aside.empty();
    proto::Envelope envelope;
    proto::ProcessExited* exited = envelope.mutable_process_exited();
    exited->set_role(exit.role);
    exited->set_member_id(exit.member_id);
    exited->set_pid(exit.pid);
    exited->set_host(host_name());
    exited->set_signalled(exit.status.signalled);
    exited->set_code(exit.status.code);
    exited->set_restart_in_s(soon ? std::max(0.0, *decision.start_at - now_s()) : -1.0);
    exited->set_no_restart(decision.set_aside);
    *exited->mutable_load() = load();
    reported_.push_back(envelope);
    if (reported_.size() > kExitsKept) reported_.pop_front();
    send(std::move(envelope));
  }
}

// Enters what is to be started into due_.
RestartDecision Agent::decide_restart(const NodeExit& exit) {
  if (end_by_ && end_by_->passed()) return {};
  // Workers that leave still need their batches; nobody needs another worker here.
  if (signals_seen_ > 0 && exit.role != proto::ROLE_DATA) return {};
  const double now = now_s();
  RestartDecision decision = policy_.on_exit(now, exit.slot, exit.status, exit.lived_s,
                                             fmt::format("{} on {}", exit.name, host_name()));
  if (!decision.start_at) return decision;
  due_[exit.slot] = {*decision.start_at, !decision.set_aside.empty()};
  if (decision.set_aside.empty()) {
    spdlog::info("{} is started anew in {:.1f} s", exit.name, *decision.start_at - now);
  } else {
    spdlog::error("{}", decision.set_aside);
  }
  return decision;
}

void Agent::plan_workers(int count) {
  asked_ += count;
  if (stop_ || signals_seen_ > 0) return;
  const double at = policy_.open_at(now_s());
  for (int slot = 0; count > 0; ++slot) {
    if (processes_.runs(slot) || due_.contains(slot)) continue;
    due_[slot] = {.at = at};
    --count;
  }
}

void Agent::start_due() {
  const int wanted = workers_wanted();
  const double now = now_s();
  for (auto entry = due_.begin(); entry != due_.end();) {
    const auto [slot, due] = *entry;
    if (due.at > now) {
      ++entry;
      continue;
    }
    entry = due_.erase(entry);
    try {
      processes_.start(slot, wanted);
    } catch (const IoError& error) {
      // Such as too many processes: as with one that ends at once, later attempts may do better.
      spdlog::error("{}", error.what());
      constexpr ExitStatus kNotStarted{.signalled = false, .code = 127};
      const auto again = policy_.on_exit(now, slot, kNotStarted, 0.0, "what could not be started");
      if (again.start_at) due_[slot] = {.at = *again.start_at};
    }
  }
}

// How many workers this node has once all that is due has been started.
int Agent::workers_wanted() const {
  int wanted = processes_.workers();
  for (const auto& [slot, due] : due_) wanted += slot != kDataSlot ? 1 : 0;
  return wanted;
}

void Agent::heed_signals() {
  const int seen = signals_.interrupts() + signals_.terminations() + signals_.user_signals();
  if (seen == signals_seen_) return;
  if (signals_seen_ == 0 && seen == 1) {
    const std::string reason = signals_.terminations() > 0 ? "SIGTERM"
                               : signals_.interrupts() > 0 ? "SIGINT"
                                                           : "SIGUSR1";
    spdlog::info("{}: asking the coordinator to let this node leave", reason);
    if (!stop_) {
      proto::Envelope envelope;
      envelope.mutable_leaving()->set_reason(reason);
      send(std::move(envelope));
      std::erase_if(due_, [](const auto& entry) { return entry.first != kDataSlot; });
      // The steps that are planned are trained first, and then the state is handed over.
      end_by_ = Deadline::after(Seconds(elastic_.collective_timeout_s));
    }
  } else {
    spdlog::warn("second signal: leaving now");
    end_by_ = Deadline::now();
  }
  signals_seen_ = seen;
}

bool Agent::finished() {
  if (processes_.empty() && due_.empty()) {
    if (stop_) return true;
    // The last of them may have told the coordinator what went wrong: its word is awaited, for a
    // while.
    if (!word_by_) word_by_ = Deadline::after(Seconds(elastic_.shutdown_timeout_s));
    if (word_by_->passed()) return true;
  } else {
    word_by_.reset();
  }
  if (!end_by_ || !end_by_->passed()) return false;
  const std::string living = processes_.living();
  if (!living.empty()) spdlog::error("killing what did not end in time: {}", living);
  if (stop_) {
    processes_.end(kLastGrace);
  } else {
    // Nothing may speak for itself any more: that they were killed is what the coordinator hears.
    processes_.kill_all();
    report_exits();
  }
  return true;
}

}  // namespace

int default_workers(int cores) {
  return std::max(1, cores / 2);
}

int default_workers() {
  cpu_set_t allowed;
  const bool known = ::sched_getaffinity(0, sizeof allowed, &allowed) == 0;
  return default_workers(known ? CPU_COUNT(&allowed)
                               : static_cast<int>(std::thread::hardware_concurrency()));
}

int run_agent(const AgentOptions& options) {
  AgentOptions resolved = options;
  if (resolved.workers == 0) resolved.workers = default_workers();
  return Agent(resolved).run();
}

}  // namespace muster
