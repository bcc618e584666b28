// Child processes that cannot outlive us: each dies with its parent (however the parent dies), runs
// in a process group of its own (Ctrl-C reaches the parent alone) and inherits no descriptor but
// its output.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "common/deadline.h"
#include "common/files.h"

namespace muster {

// How a process ended.
struct ExitStatus {
  bool signalled = false;
  int code = 0;  // signal number or exit status

  bool ok() const { return !signalled && code == 0; }
  // "was killed by SIGKILL (9)", "exited with status 1".
  std::string to_string() const;
};

struct ChildOptions {
  std::string name;               // "worker 0"; for messages
  std::vector<std::string> argv;  // argv[0] is the path of the program, it is not searched in PATH
  std::map<std::string, std::string>
      environment;  // added to ours, replacing what has the same name
  std::string
      output_path;  // stdout and stderr are appended there; "": inherited. stdin is /dev/null
};

class Child {
 public:
  // Throws IoError when the log cannot be opened or the program cannot be run. The child dies with
  // the *thread* that calls this, so call it from one that lives as long as the child shall (the
  // main thread).
  static Child spawn(const ChildOptions& options);
  // Kills the child's process group, if it still runs, and reaps the child.
  ~Child();
  Child(Child&&) noexcept;
  Child& operator=(Child&&) noexcept;

  const std::string& name() const { return name_; }
  pid_t pid() const { return pid_; }
  // Becomes readable when the child has ended; for poll().
  int pidfd() const { return pidfd_.get(); }
  // The child's end, once it is there. Later calls repeat it.
  std::optional<ExitStatus> try_wait() { return wait(Deadline::now()); }
  std::optional<ExitStatus> wait(Deadline deadline);
  // To the child alone, not to its group. Does nothing once it has ended.
  void signal(int number);
  // SIGTERM, then after `grace` SIGKILL to the whole group. Returns how the child ended.
  ExitStatus terminate(std::chrono::duration<double> grace);
  // SIGKILL to the whole group.
  ExitStatus kill();

 private:
  Child(std::string name, pid_t pid, Fd pidfd);
  void end() noexcept;

  std::string name_;
  pid_t pid_ = -1;  // -1: moved from
  Fd pidfd_;
  std::optional<ExitStatus> status_;
};

// A descriptor that becomes readable when the process ends; invalid when there is no such process.
Fd open_pidfd(pid_t pid);
// Path of the program that runs, for starting it again under another command.
std::string own_program();
// "SIGKILL (9)".
std::string signal_name(int number);

}  // namespace muster
