#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "common/error.h"
#include "common/transport/transport.h"

namespace muster {

Waker::Waker() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (fd_ < 0) throw IoError(std::string("cannot create an eventfd: ") + std::strerror(errno));
}

Waker::~Waker() {
  close(fd_);
}

void Waker::wake() noexcept {
  // A signal handler may run this: errno must survive. A full counter (EAGAIN) means already awake.
  const int saved = errno;
  const uint64_t one = 1;
  [[maybe_unused]] ssize_t ignored = write(fd_, &one, sizeof one);
  errno = saved;
}

void Waker::clear() noexcept {
  uint64_t count = 0;
  [[maybe_unused]] ssize_t ignored = read(fd_, &count, sizeof count);
}

}  // namespace muster
