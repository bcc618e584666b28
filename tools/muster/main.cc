#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>

#include "tools/muster/command.h"

namespace {

// OpenMP threads that spin for one another slow down a hundredfold on busy cores. Workers get their
// setting from the node agent; commands that compute in this process start anew with it, because
// libgomp reads it when it is loaded.
void spin_less(int argc, char** argv) {
  const bool computes =
      argc > 1 && (std::strcmp(argv[1], "generate") == 0 || std::strcmp(argv[1], "bench") == 0);
  if (!computes || std::getenv("OMP_WAIT_POLICY") != nullptr ||
      std::getenv("GOMP_SPINCOUNT") != nullptr) {
    return;
  }
  ::setenv("GOMP_SPINCOUNT", "1000", 1);
  ::execv("/proc/self/exe", argv);  // where that fails, we go on spinning
}

}  // namespace

int main(int argc, char** argv) {
  spin_less(argc, argv);
  // A closed pipe is an error of write(), and a parent that ignored SIGCHLD must not keep us from
  // our children.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGCHLD, SIG_DFL);
  return muster::run_muster({argv + 1, argv + argc});
}
