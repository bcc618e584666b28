#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>

#include "common/openmp.h"
#include "tools/muster/command.h"

namespace {

// Workers get OpenMP's settings from the node agent; commands that compute in this process start
// anew with them.
void spin_less(int argc, char** argv) {
  const bool computes =
      argc > 1 && (std::strcmp(argv[1], "generate") == 0 || std::strcmp(argv[1], "bench") == 0);
  const auto environment = muster::openmp_environment();
  if (!computes || environment.empty()) return;
  for (const auto& [name, value] : environment) ::setenv(name.c_str(), value.c_str(), 1);
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
