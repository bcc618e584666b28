#include "data/batch_server.h"

#include <fmt/format.h>
#include <unistd.h>

#include <limits>
#include <random>
#include <utility>

#include "common/error.h"
#include "common/files.h"
#include "common/logging.h"
#include "data/peer_process.h"

namespace muster {
namespace {

constexpr std::chrono::milliseconds kCheckEvery{500};  // for workers that have died
constexpr int kMaxSlots = 1024;
constexpr int64_t kMaxRingBytes = int64_t{16} << 30;

std::string random_endpoint() {
  std::random_device random;
  return fmt::format("ipc://@muster-data-{:08x}{:08x}", random(), random());
}

// Why this ring cannot be; empty when it can.
std::string unfit(const proto::OpenRing& wish, int64_t sequence_length) {
  if (wish.sequence_length() != sequence_length) {
    return fmt::format("the worker asks for samples of {} tokens, the run has {}",
                       wish.sequence_length(), sequence_length);
  }
  if (wish.slots() < 1 || wish.slots() > kMaxSlots) {
    return fmt::format("a ring has 1 to {} slots, not {}", kMaxSlots, wish.slots());
  }
  if (wish.micro_batch() < 1 ||
      wish.micro_batch() > std::numeric_limits<int32_t>::max() / sequence_length) {
    return fmt::format("a slot cannot hold {} samples", wish.micro_batch());
  }
  const int64_t bytes = SlotLayout(wish.micro_batch(), sequence_length).bytes() * wish.slots();
  if (bytes > kMaxRingBytes) {
    return fmt::format("the ring would take {} MiB: lower data.prefetch or train.micro_batch",
                       bytes >> 20);
  }
  return {};
}

}  // namespace

struct BatchServer::Ring {
  explicit Ring(const proto::OpenRing& wish)
      : member_id(wish.member_id()),
        worker(wish.pid()),
        layout(wish.micro_batch(), wish.sequence_length()),
        memory(SharedMemory::create("muster-ring",
                                    static_cast<size_t>(layout.bytes() * wish.slots()))),
        busy(static_cast<size_t>(wish.slots())) {}

  char* slot(int i) const { return memory.data() + layout.bytes() * i; }

  std::string member_id;
  PeerProcess worker;
  SlotLayout layout;
  SharedMemory memory;
  std::vector<bool> busy;  // requested and not yet answered
};

struct BatchServer::Done {
  std::string peer;
  std::shared_ptr<Ring> ring;
  int slot;
  uint64_t tag;
  std::string error;
};

BatchServer::BatchServer(Dataset& dataset, const Security& security, int threads)
    : dataset_(dataset), server_(random_endpoint(), security), pool_(threads) {}

BatchServer::~BatchServer() = default;

void BatchServer::run(const std::stop_token& stop, std::function<void(int)> rings_changed) {
  rings_changed_ = std::move(rings_changed);
  const std::stop_callback wake(stop, [this] { waker_.wake(); });
  Deadline next_check = Deadline::after(kCheckEvery);
  while (!stop.stop_requested()) {
    const auto received = server_.receive(next_check, &waker_);
    // Cleared before the queue is looked at: a task that ends after that wakes us again.
    if (!received) waker_.clear();
    reply_done();
    if (received) handle(*received);
    if (next_check.passed()) {
      drop_dead();
      next_check = Deadline::after(kCheckEvery);
    }
  }
}

void BatchServer::handle(const Received& received) {
  switch (received.envelope.body_case()) {
    case proto::Envelope::kOpenRing:
      return open_ring(received);
    case proto::Envelope::kBatchRequest:
      return request(received);
    default:
      spdlog::warn("a worker sent a message that a data service does not take");
  }
}

void BatchServer::open_ring(const Received& received) {
  const proto::OpenRing& wish = received.envelope.open_ring();
  drop_rings("replaced", [&](const Ring& ring) { return ring.member_id == wish.member_id(); });
  proto::Envelope reply;
  reply.set_request_id(received.envelope.request_id());
  std::shared_ptr<Ring> ring;
  std::string why = unfit(wish, dataset_.options().sequence_length);
  if (why.empty()) {
    try {
      ring = std::make_shared<Ring>(wish);
    } catch (const Error& error) {  // no such process, no memory
      why = error.what();
    }
  }
  if (ring == nullptr) {
    spdlog::warn("no ring for worker {}: {}", wish.member_id(), why);
    reply.mutable_refused()->set_reason(why);
  } else {
    proto::RingOpened& opened = *reply.mutable_ring_opened();
    opened.set_pid(::getpid());
    opened.set_fd(ring->memory.fd());
    opened.set_bytes(static_cast<int64_t>(ring->memory.size()));
    opened.set_slot_bytes(ring->layout.bytes());
    opened.set_slots(wish.slots());
  }
  if (server_.send(received.peer, std::move(reply)) && ring != nullptr) {
    spdlog::debug("worker {} (pid {}) opened a ring of {} slots", wish.member_id(), wish.pid(),
                  wish.slots());
    rings_[received.peer] = std::move(ring);
    if (rings_changed_) rings_changed_(static_cast<int>(rings_.size()));
  }
}

void BatchServer::request(const Received& received) {
  const proto::BatchRequest& wish = received.envelope.batch_request();
  const auto found = rings_.find(received.peer);
  std::string why;
  if (found == rings_.end()) {
    why = "this worker has no open ring";
  } else if (wish.slot() < 0 || wish.slot() >= static_cast<int>(found->second->busy.size())) {
    why = fmt::format("the ring has no slot {}", wish.slot());
  } else if (found->second->busy[static_cast<size_t>(wish.slot())]) {
    why = fmt::format("slot {} is still being filled", wish.slot());
  } else if (wish.samples_size() < 1 || wish.samples_size() > found->second->layout.micro_batch()) {
    why = fmt::format("{} samples do not fit a slot of {}", wish.samples_size(),
                      found->second->layout.micro_batch());
  }
  if (!why.empty()) {
    proto::Envelope reply;
    proto::BatchFailed& failed = *reply.mutable_batch_failed();
    failed.set_slot(wish.slot());
    failed.set_tag(wish.tag());
    failed.set_error(why);
    server_.send(received.peer, std::move(reply));
    return;
  }
  found->second->busy[static_cast<size_t>(wish.slot())] = true;
  const Split split = wish.split() == proto::SPLIT_HELD_OUT ? Split::kHeldOut : Split::kTrain;
  std::vector<int64_t> ids(wish.samples().begin(), wish.samples().end());
  Done done{received.peer, found->second, wish.slot(), wish.tag(), {}};
  pool_.submit([this, split, ids = std::move(ids), done = std::move(done)]() mutable {
    try {
      dataset_.pack(split, ids, done.tag, done.ring->layout, done.ring->slot(done.slot));
    } catch (const std::exception& error) {
      done.error = error.what();
    }
    {
      const std::lock_guard lock(mutex_);
      done_.push_back(std::move(done));
    }
    waker_.wake();
  });
}

void BatchServer::reply_done() {
  std::vector<Done> done;
  {
    const std::lock_guard lock(mutex_);
    done.swap(done_);
  }
  for (const Done& item : done) {
    const auto found = rings_.find(item.peer);
    if (found == rings_.end() || found->second != item.ring) continue;  // its worker has gone
    item.ring->busy[static_cast<size_t>(item.slot)] = false;
    proto::Envelope reply;
    if (item.error.empty()) {
      proto::BatchReady& ready = *reply.mutable_batch_ready();
      ready.set_slot(item.slot);
      ready.set_tag(item.tag);
    } else {
      spdlog::error("a batch for worker {} failed: {}", item.ring->member_id, item.error);
      proto::BatchFailed& failed = *reply.mutable_batch_failed();
      failed.set_slot(item.slot);
      failed.set_tag(item.tag);
      failed.set_error(item.error);
    }
    if (!server_.send(item.peer, std::move(reply))) {
      drop_rings("not reachable", [&](const Ring& ring) { return &ring == item.ring.get(); });
    }
  }
}

void BatchServer::drop_dead() {
  drop_rings("dead", [](const Ring& ring) { return !ring.worker.alive(); });
}

template <typename Drop>
void BatchServer::drop_rings(const char* why, Drop drop) {
  const size_t dropped = std::erase_if(rings_, [&](const auto& entry) {
    const Ring& ring = *entry.second;
    if (!drop(ring)) return false;
    spdlog::debug("the ring of worker {} (pid {}) is freed: {}", ring.member_id, ring.worker.pid(),
                  why);
    return true;
  });
  if (dropped > 0 && rings_changed_) rings_changed_(static_cast<int>(rings_.size()));
}

}  // namespace muster
