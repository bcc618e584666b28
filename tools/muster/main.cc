#include <csignal>

#include "tools/muster/command.h"

int main(int argc, char** argv) {
  // A closed pipe is an error of write(), and a parent that ignored SIGCHLD must not keep us from
  // our children.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGCHLD, SIG_DFL);
  return muster::run_muster({argv + 1, argv + argc});
}
