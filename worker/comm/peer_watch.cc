#include "worker/comm/peer_watch.h"

#include <gloo/transport/context.h>
#include <gloo/transport/unbound_buffer.h>

#include <chrono>
#include <limits>
#include <utility>

namespace muster {
namespace {

// No exchange gets there: exchanges count from 0.
constexpr uint64_t kGoodbyeSlot = std::numeric_limits<uint64_t>::max();
// Gloo offers no wait for any of several connections, so they are looked at in turn.
constexpr std::chrono::milliseconds kInterval(20);
constexpr std::chrono::milliseconds kGoodbyeTimeout(500);

}  // namespace

PeerWatch::PeerWatch(std::shared_ptr<gloo::transport::Context> context,
                     std::function<void(int, const std::string&)> lost)
    : context_(std::move(context)),
      lost_(std::move(lost)),
      goodbyes_(context_->size),
      arrivals_(context_->size) {
  for (int peer = 0; peer < context_->size; ++peer) {
    if (peer == context_->rank) continue;
    arrivals_[peer] = context_->createUnboundBuffer(&goodbyes_[peer], 1);
    arrivals_[peer]->recv(peer, kGoodbyeSlot);
  }
  thread_ = std::thread([this] { watch(); });
}

PeerWatch::~PeerWatch() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

// An aborted wait returns at once: true if the goodbye has come. It throws if the connection broke
// while the goodbye was due.
void PeerWatch::watch() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kInterval, [this] { return stopping_; })) {
    for (int peer = 0; peer < context_->size; ++peer) {
      if (!arrivals_[peer]) continue;
      try {
        arrivals_[peer]->abortWaitRecv();
        if (arrivals_[peer]->waitRecv(kGoodbyeTimeout)) {
          departed_.push_back(peer);
          arrivals_[peer].reset();
        }
      } catch (const std::exception& e) {
        lock.unlock();
        lost_(peer, e.what());
        return;
      }
    }
  }
}

std::vector<int> PeerWatch::departed() const {
  const std::lock_guard lock(mutex_);
  return departed_;
}

void PeerWatch::say_goodbye() noexcept {
  char goodbye = 1;
  for (int peer = 0; peer < context_->size; ++peer) {
    if (peer == context_->rank) continue;
    try {
      const auto message = context_->createUnboundBuffer(&goodbye, 1);
      message->send(peer, kGoodbyeSlot);
      message->waitSend(kGoodbyeTimeout);
    } catch (const std::exception&) {  // it left first
    }
  }
}

}  // namespace muster
