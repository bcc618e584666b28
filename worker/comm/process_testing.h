// Processes that tests start, hear and kill.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <string>

#include "common/deadline.h"
#include "common/error.h"
#include "common/files.h"

namespace muster::testing {

// A process of its own. What it writes to `say` can be read with hear().
class SpeakingProcess {
 public:
  // `body` runs in the process; its last line says how that ended: "done", or the kind of error and
  // its message.
  explicit SpeakingProcess(const std::function<void(int say)>& body) {
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    hear_ = Fd(ends[0]);
    const pid_t parent = getpid();
    pid_ = fork();
    if (pid_ > 0) {
      close(ends[1]);
      return;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    std::string outcome = "done";
    try {
      body(ends[1]);
    } catch (const TimeoutError& e) {
      outcome = std::string("TimeoutError ") + e.what();
    } catch (const PeerError& e) {
      outcome = std::string("PeerError ") + e.what();
    } catch (const std::exception& e) {
      outcome = std::string("other ") + e.what();
    }
    write_all(ends[1], outcome + "\n", "pipe");
    _exit(0);
  }
  ~SpeakingProcess() {
    kill(SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  SpeakingProcess(const SpeakingProcess&) = delete;
  SpeakingProcess& operator=(const SpeakingProcess&) = delete;

  void kill(int signal) const { ::kill(pid_, signal); }
  // The next line that the process writes; "" at the deadline or when it has ended.
  std::string hear(Deadline deadline) const {
    std::string line;
    pollfd event{hear_.get(), POLLIN, 0};
    while (poll(&event, 1, static_cast<int>(deadline.left().count())) > 0) {
      char c = 0;
      if (read(hear_.get(), &c, 1) != 1) return "";
      if (c == '\n') return line;
      line += c;
    }
    return "";
  }

 private:
  pid_t pid_ = -1;
  Fd hear_;
};

}  // namespace muster::testing
