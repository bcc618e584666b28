#include "worker/comm/loop_queue.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "common/check.h"
#include "common/error.h"

namespace muster {

LoopQueue::LoopQueue(std::shared_ptr<gloo::transport::tcp::Device> device)
    : device_(std::move(device)), wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!wake_.valid()) throw IoError(std::string("eventfd: ") + std::strerror(errno));
  device_->registerDescriptor(wake_.get(), EPOLLIN, this);
}

LoopQueue::~LoopQueue() {
  device_->unregisterDescriptor(wake_.get(), this);
}

void LoopQueue::post(std::function<void()> function) {
  {
    const std::lock_guard lock(mutex_);
    functions_.push_back(std::move(function));
  }
  MUSTER_CHECK(eventfd_write(wake_.get(), 1) == 0, std::strerror(errno));
}

void LoopQueue::handleEvents(int /*events*/) {
  eventfd_t count = 0;
  eventfd_read(wake_.get(), &count);
  std::vector<std::function<void()>> functions;
  {
    const std::lock_guard lock(mutex_);
    functions.swap(functions_);
  }
  for (const std::function<void()>& function : functions) function();
}

}  // namespace muster
