// Runs functions on the thread of Gloo's event loop. That thread never waits for a connection's
// lock: it spins over the ready socket until the lock is free, and where cores are short it spins
// against the very thread that holds the lock, for a whole time slice (measured: 3 ms a collective
// instead of 0.2 ms). If only the loop's own thread posts messages, nobody competes for the lock.
#pragma once

#include <gloo/transport/tcp/device.h>

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "common/files.h"

namespace muster {

class LoopQueue : private gloo::transport::tcp::Handler {
 public:
  explicit LoopQueue(std::shared_ptr<gloo::transport::tcp::Device> device);
  // What was posted has run by then or never runs.
  ~LoopQueue() override;
  LoopQueue(const LoopQueue&) = delete;
  LoopQueue& operator=(const LoopQueue&) = delete;

  // Runs `function` soon, in the order of posting. It must not throw or block.
  void post(std::function<void()> function);

 private:
  void handleEvents(int events) override;

  std::shared_ptr<gloo::transport::tcp::Device> device_;
  Fd wake_;  // eventfd
  std::mutex mutex_;
  std::vector<std::function<void()>> functions_;
};

}  // namespace muster
