#include "tools/muster/local_run.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <optional>
#include <tuple>

#include "common/error.h"
#include "common/files.h"
#include "common/process.h"
#include "common/run_dir.h"
#include "common/signals.h"
#include "coordinator/coordinator.h"
#include "tools/muster/command.h"
#include "tools/muster/format.h"
#include "tools/muster/observer.h"
#include "tools/muster/progress.h"
#include "tools/muster/run_report.h"
#include "worker/agent/agent.h"
#include "worker/agent/restart_policy.h"

namespace muster {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr Seconds kPollInterval(0.2);
constexpr Seconds kStartTimeout(30.0);
// From being asked to leave at once until being killed.
constexpr Seconds kLeaveNowGrace(3.0);
// Between SIGTERM and SIGKILL of what does not end.
constexpr Seconds kLastGrace(1.0);

// Tells a file from one that is put in its place by rename: inode, and time of the last change.
using FileVersion = std::optional<std::tuple<ino_t, int64_t, int64_t>>;

FileVersion version_of(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return std::nullopt;
  return std::tuple(info.st_ino, info.st_mtim.tv_sec, info.st_mtim.tv_nsec);
}

class LocalRun {
 public:
  explicit LocalRun(const LocalRunOptions& options)
      : options_(options),
        dir_{run_dir_of(options.config)},
        coordinator_log_(dir_.logs() + "/coordinator.log"),
        node_log_(dir_.logs() + "/node.log"),
        shutdown_timeout_(options.config.elastic.shutdown_timeout_s),
        restarts_({.restarts = options.config.elastic.restarts,
                   .window_s = options.config.elastic.restart_window_s,
                   .cool_down_s = options.config.elastic.cool_down_s}),
        coordinator_restarts_(restarts_),
        progress_(::isatty(STDOUT_FILENO) == 1) {}

  int run();

 private:
  Child start(const std::string& name, const std::string& log, const Arguments& arguments);
  void start_coordinator(const std::string& listen, bool rejoin);
  bool start_coordinator_again();
  bool wait_for_endpoint(const FileVersion& stale);
  void start_node();
  bool start_node_again(const ExitStatus& status);
  void watch();
  void ask_stop(const std::string& reason, bool immediately);
  void heed_signals();
  void heed_node();
  void poll_status();
  void tell_troubles();
  void end(Child& child, Seconds patience);
  bool node_is_silent() const;
  void end_children();
  int signals_seen() const {
    return signals_.interrupts() + signals_.terminations() + signals_.user_signals();
  }
  int report();
  std::string final_reason();
  std::string bad_end();
  void print_logs(bool without_reason);

  const LocalRunOptions options_;
  const RunDir dir_;
  const std::string coordinator_log_;
  const std::string node_log_;
  const Seconds shutdown_timeout_;
  RestartPolicy restarts_;
  RestartPolicy coordinator_restarts_;
  Deadline::Clock::time_point coordinator_started_;
  Progress progress_;
  Waker waker_;
  SignalWatch signals_{waker_, /*children=*/true};
  GrowingFiles logs_;
  GrowingFiles news_;
  std::optional<Child> coordinator_;
  std::optional<Child> node_;  // the newest one
  std::string coordinator_endpoint_;
  Deadline::Clock::time_point node_started_;
  std::optional<Deadline> node_due_;  // when the next one is started in the place of one that died
  std::optional<Observer> observer_;

  int signals_heeded_ = 0;
  bool node_seen_ended_ = false;
  std::string failure_;  // what happened, where we saw it and the coordinator could not
  std::optional<proto::Status> last_;  // newest status
  Deadline next_poll_ = Deadline::now();
  std::optional<Deadline> end_by_;  // when a coordinator that should have ended is killed
};

Child LocalRun::start(const std::string& name, const std::string& log, const Arguments& arguments) {
  ChildOptions child{.name = name, .argv = {own_program()}, .environment = {}, .output_path = log};
  child.argv.insert(child.argv.end(), arguments.begin(), arguments.end());
  if (options_.security.enabled()) child.environment[kRunKeyVariable] = options_.security.run_key;
  return Child::spawn(child);
}

int LocalRun::run() {
  make_dirs(dir_.logs());
  for (const std::string& file : {dir_.events(), coordinator_log_, node_log_}) logs_.watch(file);
  news_.watch(dir_.events());
  // One that another coordinator left behind, or one of a run that is at work there, is not ours.
  const FileVersion stale = version_of(dir_.endpoint());
  progress_.note(fmt::format("run {} in {}, {} worker{}", options_.config.run.name, dir_.root,
                             options_.workers, options_.workers == 1 ? "" : "s"));
  start_coordinator("tcp://127.0.0.1:0", /*rejoin=*/false);
  if (wait_for_endpoint(stale)) {
    const RunAddress address = find_run(dir_.root, options_.security);
    coordinator_endpoint_ = address.endpoint;
    start_node();
    observer_.emplace(address);
    watch();
  }
  end_children();
  if (node_) tell_troubles();
  progress_.clear();
  return report();
}

void LocalRun::start_coordinator(const std::string& listen, bool rejoin) {
  Arguments arguments = {
      "coordinator", options_.config_path,  "--listen",         listen,
      "--rejoin",    rejoin ? "yes" : "no", "--resume-command", options_.resume_command};
  for (const std::string& assignment : options_.overrides) {
    arguments.insert(arguments.end(), {"--set", assignment});
  }
  arguments.insert(arguments.end(), {"--set", "run.dir=" + dir_.root, "--set",
                                     fmt::format("parallel.workers={}", options_.workers)});
  coordinator_ = start("the coordinator", coordinator_log_, arguments);
  coordinator_started_ = Deadline::Clock::now();
}

// Another one in the place of one that was killed. The node waits for it meanwhile.
bool LocalRun::start_coordinator_again() {
  const ExitStatus status = *coordinator_->try_wait();
  if (!status.signalled || signals_seen() > 0 || node_seen_ended_ || end_by_ ||
      (last_ && last_->finished())) {
    return false;
  }
  const auto now = Deadline::Clock::now();
  const RestartDecision decision =
      coordinator_restarts_.on_exit(Seconds(now.time_since_epoch()).count(), 0, status,
                                    Seconds(now - coordinator_started_).count(), "the coordinator");
  if (!decision.start_at || !decision.set_aside.empty()) return false;
  progress_.note(fmt::format("the coordinator (pid {}) {}: another one goes on",
                             coordinator_->pid(), status.to_string()));
  observer_.reset();
  const FileVersion stale = version_of(dir_.endpoint());
  start_coordinator(coordinator_endpoint_, /*rejoin=*/true);
  if (!wait_for_endpoint(stale)) return false;
  observer_.emplace(find_run(dir_.root, options_.security));
  return true;
}

// With as many workers as the run is to have by now.
void LocalRun::start_node() {
  const int asked = last_ ? last_->target_workers() : 0;
  node_ = start("the node agent", node_log_,
                {"node", "--coordinator", coordinator_endpoint_, "--workers",
                 std::to_string(asked > 0 ? asked : options_.workers)});
  node_started_ = Deadline::Clock::now();
  node_due_.reset();
}

// Plans another agent in the place of one that died with its workers, if the run needs it.
bool LocalRun::start_node_again(const ExitStatus& status) {
  if (signals_seen() > 0 || (last_ && last_->finished())) return false;
  using Clock = Deadline::Clock;
  const auto now = Clock::now();
  const double now_s = Seconds(now.time_since_epoch()).count();
  const RestartDecision decision =
      restarts_.on_exit(now_s, 0, status, Seconds(now - node_started_).count(), "the node agent");
  // The node is all that this run has: nobody would train during a cool-down.
  if (!decision.start_at || !decision.set_aside.empty()) return false;
  node_due_ = Deadline::after(Seconds(*decision.start_at - now_s));
  progress_.note(fmt::format("the node agent (pid {}) {}: another one is started", node_->pid(),
                             status.to_string()));
  return true;
}

bool LocalRun::wait_for_endpoint(const FileVersion& stale) {
  constexpr std::chrono::milliseconds kInterval(10);
  const Deadline deadline = Deadline::after(kStartTimeout);
  while (!coordinator_->wait(Deadline::after(kInterval))) {
    if (const auto now = version_of(dir_.endpoint()); now && now != stale) return true;
    if (signals_.interrupts() + signals_.terminations() > 0) {
      failure_ = "interrupted before the run began";
      return false;
    }
    if (deadline.passed()) {
      failure_ = fmt::format("the coordinator (pid {}) did not listen within {:.0f} s",
                             coordinator_->pid(), kStartTimeout.count());
      return false;
    }
  }
  return false;
}

void LocalRun::watch() {
  while (!coordinator_->try_wait() || start_coordinator_again()) {
    if (end_by_ && end_by_->passed()) return;
    try {
      heed_signals();
      heed_node();
      poll_status();
      tell_troubles();
    } catch (const PeerError& error) {
      // It will end, or be ended by the user; its own log says more.
      progress_.note(error.what());
      observer_.reset();
    }
    waker_.clear();
  }
}

void LocalRun::tell_troubles() {
  for (const std::string& trouble : troubles(news_.take_lines(dir_.events()))) {
    progress_.note(trouble);
  }
}

void LocalRun::ask_stop(const std::string& reason, bool immediately) {
  if (observer_) {
    observer_->ask_stop(reason, immediately, Deadline::after(kLastGrace));
  } else {
    coordinator_->signal(SIGTERM);
  }
  if (immediately) end_by_ = Deadline::after(kLeaveNowGrace);
}

void LocalRun::heed_signals() {
  const int seen = signals_seen();
  if (seen == signals_heeded_) return;
  const bool first = signals_heeded_ == 0 && seen == 1;
  const bool leave_now = signals_heeded_ < 2 && seen >= 2;
  signals_heeded_ = seen;
  const std::string reason = signals_.terminations() > 0 ? "SIGTERM"
                             : signals_.interrupts() > 0 ? "Ctrl-C"
                                                         : "SIGUSR1";
  if (first) {
    progress_.note(reason + ": finishing the step and saving; once more: leave now");
    ask_stop(reason, /*immediately=*/false);
  } else if (leave_now) {
    progress_.note(reason + " again: leaving now");
    failure_ = reason + " twice: left at once, without saving";
    ask_stop(reason + " twice", /*immediately=*/true);
  } else {
    end_by_ = Deadline::now();
  }
}

void LocalRun::heed_node() {
  if (node_seen_ended_) return;
  if (node_due_) {
    if (node_due_->passed()) start_node();
    return;
  }
  const auto status = node_->try_wait();
  if (!status) return;
  if (status->signalled && start_node_again(*status)) return;
  node_seen_ended_ = true;
  // An agent that ends by itself has told the coordinator why, or was told by it.
  end_by_ = Deadline::after(shutdown_timeout_);
  if (!status->signalled) return;
  failure_ = fmt::format("the node agent (pid {}) {}", node_->pid(), status->to_string());
  ask_stop(failure_, /*immediately=*/true);
}

void LocalRun::poll_status() {
  if (next_poll_.passed()) {
    if (observer_) observer_->ask_status(Deadline::after(kLastGrace));
    next_poll_ = Deadline::after(kPollInterval);
  }
  Deadline wake_up = end_by_ ? next_poll_.earlier(*end_by_) : next_poll_;
  if (node_due_) wake_up = wake_up.earlier(*node_due_);
  if (!observer_) {
    coordinator_->wait(wake_up);
  } else if (auto status = observer_->receive(wake_up, &waker_)) {
    last_ = std::move(*status);
    progress_.show(*last_);
  }
}

// Waits for a child that should end by itself, and ends it when it does not; a further signal cuts
// the waiting short.
void LocalRun::end(Child& child, Seconds patience) {
  constexpr std::chrono::milliseconds kInterval(50);
  const Deadline deadline = Deadline::after(patience);
  while (!child.wait(deadline.earlier(Deadline::after(kInterval)))) {
    if (!deadline.passed() && signals_seen() == signals_heeded_) continue;
    if (&child == &*coordinator_ && failure_.empty()) {
      failure_ = fmt::format("the coordinator (pid {}) did not answer and was killed", child.pid());
    }
    child.terminate(kLastGrace);
  }
}

// The coordinator has given it up: it is not worth waiting for.
bool LocalRun::node_is_silent() const {
  if (!last_ || !last_->finished() || last_->ok()) return false;
  return std::any_of(last_->members().begin(), last_->members().end(), [&](const auto& member) {
    return member.role() == proto::ROLE_NODE && member.state() == "gone";
  });
}

void LocalRun::end_children() {
  observer_.reset();  // the coordinator waits for its observers to see the end
  const bool orderly = coordinator_->try_wait() && !coordinator_->try_wait()->signalled;
  if (!node_) return end(*coordinator_, Seconds(0));
  // Without a coordinator, or with one that does not end, nothing of the node's work can be kept.
  // The node's processes die with their agent.
  if (!orderly || node_is_silent()) node_->kill();
  end(*coordinator_, kLeaveNowGrace);
  end(*node_, shutdown_timeout_ + kLastGrace);
}

int LocalRun::report() {
  const ExitStatus coordinator = *coordinator_->try_wait();
  const bool ok = coordinator.ok() && failure_.empty() && (!node_ || node_->try_wait()->ok());
  const std::string reason = final_reason();
  if (const std::string files = last_ ? unused_files(*last_) : ""; !files.empty()) {
    fmt::print("{}: events.jsonl names them\n", files);
  }
  if (last_ && last_->step() > 0) {
    fmt::print("{}, {}\n", progress_line(*last_), format_duration(last_->elapsed_s()));
  }
  if (ok) {
    fmt::print("{}\n", reason.empty() ? "nothing was left to do" : reason);
  } else {
    std::fflush(stdout);
    print_error(fmt::format("muster train: {}\n", reason.empty()
                                                      ? "the coordinator " + coordinator.to_string()
                                                      : reason));
    print_logs(reason.empty());
  }
  const bool complete =
      ok && last_ &&
      (last_->step() >= last_->total_steps() || last_->reason().starts_with("nothing to do"));
  const bool began = node_.has_value();
  if (began && !complete && reason.find(options_.resume_command) == std::string::npos) {
    fmt::print("to resume: {}\n", options_.resume_command);
  }
  if (ok) return 0;
  return coordinator.signalled || coordinator.code == 0 ? 1 : coordinator.code;
}

std::string LocalRun::final_reason() {
  if (last_ && last_->finished()) return last_->reason() + bad_end();
  if (!failure_.empty()) return failure_;
  const ExitStatus coordinator = *coordinator_->try_wait();
  if (coordinator.signalled) {
    return fmt::format("the coordinator (pid {}) {}", coordinator_->pid(), coordinator.to_string());
  }
  // One that could not start wrote no event; what is new in events.jsonl is then another
  // coordinator's.
  if (!node_) return last_message(logs_.added(coordinator_log_), "muster coordinator: ");
  return last_reason(logs_.added(dir_.events()));
}

// What went wrong after a run that ended well: a process that did not; "" when nothing did.
std::string LocalRun::bad_end() {
  if (!last_->ok()) return "";
  for (std::optional<Child>* child : {&coordinator_, &node_}) {
    if (!*child) continue;
    const ExitStatus status = *(*child)->try_wait();
    if (!status.ok()) {
      return fmt::format("; but {} (pid {}) {}", (*child)->name(), (*child)->pid(),
                         status.to_string());
    }
  }
  return "";
}

void LocalRun::print_logs(bool without_reason) {
  constexpr size_t kMostLines = 20;
  // What the coordinator has no word for: it could not start, or a process died before it could
  // speak.
  const std::vector<std::string> lines = without_reason
                                             ? last_lines(logs_.added(coordinator_log_), kMostLines)
                                             : error_lines(logs_.added(node_log_), kMostLines);
  for (const std::string& line : lines) print_error("  " + line + "\n");
  print_error("logs: " + dir_.logs() + "\n");
}

}  // namespace

int run_locally(const LocalRunOptions& options) {
  if (const auto reason = nothing_to_do(options.config)) {
    fmt::print("{}\n", *reason);
    return 0;
  }
  return LocalRun(options).run();
}

}  // namespace muster
