#include <gloo/transport/context.h>
#include <gloo/transport/unbound_buffer.h>

#include <set>

#include "common/error.h"
#include "worker/comm/gloo_mesh.h"
#include "worker/comm/loop_queue.h"

namespace muster {
namespace {

// True when the message is complete, false when the wait was aborted; Gloo throws when the
// connection is gone or the time is up.
bool wait(gloo::transport::UnboundBuffer& buffer, bool outgoing, std::chrono::milliseconds time) {
  return outgoing ? buffer.waitSend(time) : buffer.waitRecv(time);
}

void abort_wait(gloo::transport::UnboundBuffer& buffer) {
  buffer.abortWaitSend();
  buffer.abortWaitRecv();
}

}  // namespace

Exchange::Exchange(GlooMesh& mesh, const char* what) : mesh_(mesh), what_(what) {}

Exchange::~Exchange() {
  if (!messages_.empty()) {
    mesh_.abort(std::string(what_) + ": left before it was complete");
    forget_buffers();
  }
}

void Exchange::receive(int peer, void* data, size_t bytes) {
  add(peer, false, data, bytes);
}

void Exchange::send(int peer, const void* data, size_t bytes) {
  // Gloo's buffers are for both directions; it only reads from one that is sent.
  add(peer, true, const_cast<void*>(data), bytes);
}

void Exchange::add(int peer, bool outgoing, void* data, size_t bytes) {
  MUSTER_CHECK(peer >= 0 && peer < mesh_.world_size_ && peer != mesh_.rank_);
  if (bytes == 0) return;
  const std::lock_guard lock(mesh_.mutex_);
  if (mesh_.aborted_) throw PeerError(mesh_.reason_);
  GlooMesh::Traffic& traffic = mesh_.traffic_[peer];
  messages_.push_back({peer, outgoing, outgoing ? traffic.sent++ : traffic.received++,
                       mesh_.context_->createUnboundBuffer(data, bytes)});
  mesh_.buffers_.insert(messages_.back().buffer.get());
}

void Exchange::start() {
  if (messages_.empty()) return;
  std::promise<Refusal> posted;
  posted_ = posted.get_future();
  mesh_.loop_->post([this, promise = std::make_shared<std::promise<Refusal>>(std::move(posted))] {
    Refusal refusal = post_all();
    if (refusal.message >= 0) {
      for (const Message& message : messages_) abort_wait(*message.buffer);
    }
    promise->set_value(std::move(refusal));  // last: this exchange may be gone from here on
  });
}

Exchange::Refusal Exchange::post_all() {
  {
    const std::lock_guard lock(mesh_.mutex_);
    if (mesh_.aborted_) return {};  // whoever aborts may be closing the connections already
  }
  for (size_t i = 0; i < messages_.size(); ++i) {
    const Message& message = messages_[i];
    try {
      if (message.outgoing) {
        message.buffer->send(message.peer, message.slot);
      } else {
        message.buffer->recv(message.peer, message.slot);
      }
    } catch (const std::exception& e) {
      return {static_cast<int>(i), e.what()};
    }
  }
  return {};
}

void Exchange::finish(Deadline deadline) {
  for (size_t i = 0; i < messages_.size(); ++i) {
    bool complete = false;
    try {
      complete = wait(*messages_[i].buffer, messages_[i].outgoing, deadline.left());
    } catch (const std::exception& e) {
      fail(i, deadline.passed(), e.what());
    }
    if (!complete) {
      const Refusal refusal = posted_.get();
      if (refusal.message >= 0) fail(refusal.message, false, refusal.detail);
      forget_buffers();
      mesh_.check_alive();
      MUSTER_CHECK(false, "Gloo gave up a wait that nobody aborted");
    }
  }
  forget_buffers();
}

// Which other ranks are concerned: an aborted wait returns if the message is complete or merely
// not there yet, and throws if its connection is broken; after a timeout Gloo has broken all
// connections, so that exactly the messages that have not arrived throw.
void Exchange::fail(size_t failed, bool late, const std::string& detail) {
  std::set<int> ranks{messages_[failed].peer};
  for (size_t i = 0; i < messages_.size(); ++i) {
    if (i == failed) continue;
    abort_wait(*messages_[i].buffer);
    try {
      wait(*messages_[i].buffer, messages_[i].outgoing, std::chrono::milliseconds(1));
    } catch (const std::exception&) {
      ranks.insert(messages_[i].peer);
    }
  }
  std::string reason = what_;
  if (late) {
    char seconds[32];
    std::snprintf(seconds, sizeof(seconds), "%g s", mesh_.timeout_.count());
    reason += ": no answer from " + mesh_.name(ranks) + " within " + seconds;
  } else {
    // A peer that left because of another's death may be the one that is missed here first.
    ranks.merge(mesh_.watch_->lost());
    reason += ": lost " + mesh_.name(ranks) + " (" + detail + ")";
  }
  forget_buffers();
  if (late) {
    mesh_.abort(reason);
    // Gloo has closed all connections by now, which the watch may have taken for their loss.
    const std::lock_guard lock(mesh_.mutex_);
    mesh_.reason_ = reason;
    throw TimeoutError(reason);
  }
  mesh_.check_alive();  // a reason given before wins: this failure follows from it
  mesh_.abort(reason);
  throw PeerError(reason);
}

// A buffer's destructor waits until Gloo's thread has let go of its memory.
void Exchange::forget_buffers() noexcept {
  if (posted_.valid()) posted_.wait();
  {
    const std::lock_guard lock(mesh_.mutex_);
    for (const Message& message : messages_) mesh_.buffers_.erase(message.buffer.get());
  }
  messages_.clear();
}

}  // namespace muster
