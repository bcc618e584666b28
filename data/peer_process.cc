#include "data/peer_process.h"

#include <fmt/format.h>
#include <poll.h>

#include <cerrno>
#include <cstring>

#include "common/error.h"
#include "common/process.h"

namespace muster {

PeerProcess::PeerProcess(pid_t pid) : pid_(pid), pidfd_(open_pidfd(pid)) {
  if (!pidfd_.valid()) {
    throw PeerError(
        fmt::format("process {} cannot be watched: {}; data service and workers must "
                    "share one process id namespace",
                    pid, std::strerror(errno)));
  }
}

bool PeerProcess::alive() const {
  pollfd poll_fd{pidfd_.get(), POLLIN, 0};  // readable once the process has ended
  return ::poll(&poll_fd, 1, 0) <= 0;       // a look that a signal interrupts has seen no end
}

}  // namespace muster
