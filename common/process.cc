#include "common/process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/close_range.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#include "common/check.h"
#include "common/error.h"

namespace muster {
namespace {

// execve's form of a list of strings; points into it.
std::vector<char*> pointers_to(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  pointers.reserve(strings.size() + 1);
  for (std::string& text : strings) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

std::vector<std::string> merged_environment(const std::map<std::string, std::string>& additions) {
  std::vector<std::string> merged;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    if (!additions.contains(std::string(text.substr(0, text.find('='))))) merged.emplace_back(text);
  }
  for (const auto& [name, value] : additions) merged.push_back(fmt::format("{}={}", name, value));
  return merged;
}

// What the child needs between fork and exec, where only async-signal-safe calls are allowed.
struct ExecPlan {
  pid_t parent;
  char* const* argv;
  char* const* environment;
  int input;
  int output;  // -1: inherited
  int report;  // close-on-exec; gets errno when exec does not happen
};

[[noreturn]] void exec_child(const ExecPlan& plan) {
  const auto give_up = [&] {
    const int error = errno;
    // Nobody to tell when the parent is gone, and then nothing to do about it.
    [[maybe_unused]] const ssize_t written = ::write(plan.report, &error, sizeof error);
    ::_exit(127);
  };
  if (::setpgid(0, 0) != 0 || ::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) give_up();
  // The parent may have died before prctl: then no signal will come.
  if (::getppid() != plan.parent) ::_exit(127);
  for (int number = 1; number < NSIG; ++number) ::signal(number, SIG_DFL);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  if (::dup2(plan.input, STDIN_FILENO) < 0) give_up();
  if (plan.output >= 0 &&
      (::dup2(plan.output, STDOUT_FILENO) < 0 || ::dup2(plan.output, STDERR_FILENO) < 0)) {
    give_up();
  }
  // Libraries open descriptors without O_CLOEXEC; a socket kept open in a child keeps its port
  // taken.
  ::close_range(STDERR_FILENO + 1, ~0U, CLOSE_RANGE_CLOEXEC);
  ::execve(plan.argv[0], plan.argv, plan.environment);
  give_up();
  ::_exit(127);
}

Fd open_or_throw(const std::string& path, int flags) {
  Fd fd(::open(path.c_str(), flags | O_CLOEXEC, 0644));
  if (!fd.valid()) throw IoError(fmt::format("{}: cannot open: {}", path, std::strerror(errno)));
  return fd;
}

}  // namespace

std::string signal_name(int number) {
  const char* abbreviation = ::sigabbrev_np(number);
  if (abbreviation == nullptr) return fmt::format("signal {}", number);
  return fmt::format("SIG{} ({})", abbreviation, number);
}

std::string ExitStatus::to_string() const {
  return signalled ? "was killed by " + signal_name(code)
                   : fmt::format("exited with status {}", code);
}

Child Child::spawn(const ChildOptions& options) {
  MUSTER_CHECK(!options.argv.empty());
  std::vector<std::string> argv = options.argv;
  std::vector<std::string> environment = merged_environment(options.environment);
  const std::vector<char*> argv_pointers = pointers_to(argv);
  const std::vector<char*> environment_pointers = pointers_to(environment);
  const Fd input = open_or_throw("/dev/null", O_RDONLY);
  Fd output;
  if (!options.output_path.empty()) {
    output = open_or_throw(options.output_path, O_WRONLY | O_CREAT | O_APPEND);
  }
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    throw IoError(fmt::format("cannot start {}: pipe: {}", options.name, std::strerror(errno)));
  }
  const Fd report(ends[0]);
  Fd report_writer(ends[1]);
  const ExecPlan plan{.parent = ::getpid(),
                      .argv = argv_pointers.data(),
                      .environment = environment_pointers.data(),
                      .input = input.get(),
                      .output = output.get(),
                      .report = report_writer.get()};
  const pid_t pid = ::fork();
  if (pid == 0) exec_child(plan);
  if (pid < 0) {
    throw IoError(fmt::format("cannot start {}: fork: {}", options.name, std::strerror(errno)));
  }
  Child child(options.name, pid, open_pidfd(pid));
  report_writer.reset();
  int error = 0;
  ssize_t got = 0;
  do {
    got = ::read(report.get(), &error, sizeof error);
  } while (got < 0 && errno == EINTR);
  if (got == sizeof error) {
    throw IoError(fmt::format("cannot start {}: {}: {}", options.name, options.argv[0],
                              std::strerror(error)));
  }
  MUSTER_CHECK(child.pidfd_.valid(), std::strerror(errno));
  return child;
}

Child::Child(std::string name, pid_t pid, Fd pidfd)
    : name_(std::move(name)), pid_(pid), pidfd_(std::move(pidfd)) {}

Child::~Child() {
  end();
}

Child::Child(Child&& other) noexcept
    : name_(std::move(other.name_)),
      pid_(std::exchange(other.pid_, -1)),
      pidfd_(std::move(other.pidfd_)),
      status_(other.status_) {}

Child& Child::operator=(Child&& other) noexcept {
  if (this != &other) {
    end();
    name_ = std::move(other.name_);
    pid_ = std::exchange(other.pid_, -1);
    pidfd_ = std::move(other.pidfd_);
    status_ = other.status_;
  }
  return *this;
}

void Child::end() noexcept {
  if (pid_ < 0 || status_) return;
  try {
    kill();
  } catch (const std::exception& error) {
    spdlog::error("{}", error.what());
  }
}

std::optional<ExitStatus> Child::wait(Deadline deadline) {
  while (!status_) {
    pollfd ready{.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
    const int count = ::poll(&ready, 1, static_cast<int>(deadline.left().count()));
    if (count < 0 && errno == EINTR) continue;
    if (count == 0) {
      if (deadline.passed()) return std::nullopt;
      continue;
    }
    int status = 0;
    MUSTER_CHECK(::waitpid(pid_, &status, 0) == pid_, name_ + ": " + std::strerror(errno));
    const bool signalled = WIFSIGNALED(status);
    status_ = ExitStatus{signalled, signalled ? WTERMSIG(status) : WEXITSTATUS(status)};
  }
  return status_;
}

void Child::signal(int number) {
  if (!try_wait()) ::kill(pid_, number);
}

ExitStatus Child::terminate(std::chrono::duration<double> grace) {
  signal(SIGTERM);
  if (const auto status = wait(Deadline::after(grace))) return *status;
  return kill();
}

ExitStatus Child::kill() {
  // A child that has ended is reaped: its group's number may be another's by now.
  if (!try_wait()) ::kill(-pid_, SIGKILL);
  // Nothing survives SIGKILL but a process stuck in the kernel (a dead network disk).
  constexpr std::chrono::seconds kStuck(30);
  const auto status = wait(Deadline::after(kStuck));
  if (!status) {
    throw TimeoutError(fmt::format("{} (pid {}) does not die: {} s after SIGKILL it still runs",
                                   name_, pid_, kStuck.count()));
  }
  return *status;
}

Fd open_pidfd(pid_t pid) {
  // glibc 2.36's wrapper has no C linkage in C++.
  return Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

std::string own_program() {
  std::string path(4096, '\0');
  const ssize_t length = ::readlink("/proc/self/exe", path.data(), path.size());
  if (length < 0) throw IoError(fmt::format("/proc/self/exe: {}", std::strerror(errno)));
  path.resize(static_cast<size_t>(length));
  return path;
}

}  // namespace muster
