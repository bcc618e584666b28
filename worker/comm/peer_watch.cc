#include "worker/comm/peer_watch.h"

#include <gloo/transport/context.h>
#include <gloo/transport/unbound_buffer.h>

#include <chrono>
#include <limits>
#include <string>
#include <utility>

#include "common/error.h"

namespace muster {
namespace {

// No exchange gets there: messages count from 0.
constexpr uint64_t kGoodbyeSlot = std::numeric_limits<uint64_t>::max();
constexpr uint64_t kNothingSlot = kGoodbyeSlot - 1;
// Gloo offers no wait for any of several connections, so they are looked at in turn.
constexpr std::chrono::milliseconds kInterval(20);
constexpr std::chrono::milliseconds kGoodbyeTimeout(500);

// What broke the connection while the buffer's message was due; "" when nothing did. An aborted
// wait returns at once, and does not say whether the message has come.
std::string broken(gloo::transport::UnboundBuffer& buffer) {
  try {
    buffer.abortWaitRecv();
    buffer.waitRecv(kGoodbyeTimeout);
    return "";
  } catch (const std::exception& e) {
    return e.what();
  }
}

}  // namespace

PeerWatch::PeerWatch(std::shared_ptr<gloo::transport::Context> context,
                     std::function<void(const std::set<int>&, const std::string&)> on_loss)
    : context_(std::move(context)),
      on_loss_(std::move(on_loss)),
      goodbyes_(context_->size),
      arrivals_(context_->size),
      ends_(context_->size) {
  for (int peer = 0; peer < context_->size; ++peer) {
    if (peer == context_->rank) continue;
    arrivals_[peer] = context_->createUnboundBuffer(&goodbyes_[peer], 1);
    ends_[peer] = context_->createUnboundBuffer(&goodbyes_[peer], 1);
    try {
      arrivals_[peer]->recv(peer, kGoodbyeSlot);
      ends_[peer]->recv(peer, kNothingSlot);
    } catch (const std::exception& e) {
      throw PeerError("lost rank " + std::to_string(peer) + " as soon as it was met (" + e.what() +
                      ")");
    }
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

// A connection's end is always noticed by what never comes; it was in good order if the goodbye was
// no longer due.
void PeerWatch::watch() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kInterval, [this] { return stopping_; })) {
    for (int peer = 0; peer < context_->size; ++peer) {
      if (!ends_[peer] || broken(*ends_[peer]).empty()) continue;
      const std::string why = broken(*arrivals_[peer]);
      if (!why.empty()) {
        lock.unlock();
        on_loss_(lost(), why);
        return;
      }
      departed_.push_back(peer);
      ends_[peer].reset();
    }
  }
}

std::set<int> PeerWatch::lost() const {
  const std::lock_guard lock(mutex_);
  std::set<int> ranks;
  for (int peer = 0; peer < context_->size; ++peer) {
    if (ends_[peer] && !broken(*ends_[peer]).empty() && !broken(*arrivals_[peer]).empty()) {
      ranks.insert(peer);
    }
  }
  return ranks;
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
