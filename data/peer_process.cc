#include "data/peer_process.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "common/error.h"

namespace muster {

// By number: the header of this call in glibc 2.36 does not declare it for C++.
PeerProcess::PeerProcess(pid_t pid)
    : pid_(pid), pidfd_(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))) {
  if (!pidfd_.valid()) {
    throw PeerError(
        fmt::format("process {} cannot be watched: {}; data service and workers must "
                    "share one process id namespace",
                    pid, std::strerror(errno)));
  }
}

bool PeerProcess::alive() const {
  pollfd poll_fd{pidfd_.get(), POLLIN, 0};  // readable once the process has ended
  return ::poll(&poll_fd, 1, 0) == 0;
}

}  // namespace muster
