#include "data/client.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/error.h"
#include "common/files.h"
#include "common/logging.h"
#include "common/transport/transport.h"
#include "data/peer_process.h"
#include "data/slot.h"

namespace muster {
namespace {

// A lost wake-up or a service that dies must not park us for ever.
constexpr std::chrono::milliseconds kLookEvery{200};

enum class SlotState : uint8_t { kFree, kRequested, kHeld };

struct Request {
  uint64_t tag;
  int slot;
  bool answered = false;
  std::string error;
};

}  // namespace

struct DataClient::Impl {
  Impl(const DataClientOptions& wish, const Security& security)
      : options(wish),
        layout(options.micro_batch, options.sequence_length),
        client(options.endpoint, security, "the data service"),
        states(static_cast<size_t>(options.slots), SlotState::kFree),
        batches(states.size()) {}

  void open(Deadline deadline);
  void receive(Deadline deadline);
  void answer(int slot, uint64_t tag, const std::string& error);

  const DataClientOptions options;
  const SlotLayout layout;
  Client client;
  std::optional<PeerProcess> service;
  SharedMemory ring;
  std::vector<SlotState> states;
  std::vector<Batch> batches;    // of the held slots
  std::deque<Request> requests;  // oldest first
  uint64_t next_tag = 1;
  double data_wait_s = 0;
};

void DataClient::Impl::open(Deadline deadline) {
  proto::Envelope envelope;
  proto::OpenRing& wish = *envelope.mutable_open_ring();
  wish.set_member_id(options.member_id);
  wish.set_pid(::getpid());
  wish.set_slots(options.slots);
  wish.set_micro_batch(static_cast<int32_t>(options.micro_batch));
  wish.set_sequence_length(static_cast<int32_t>(options.sequence_length));
  const proto::Envelope reply = client.call(std::move(envelope), deadline);
  const proto::RingOpened& opened = reply.ring_opened();
  if (!reply.has_ring_opened() || opened.slots() != options.slots ||
      opened.slot_bytes() != layout.bytes() || opened.bytes() != layout.bytes() * options.slots) {
    throw PeerError(fmt::format(
        "the data service at {} opened a ring of another layout: it runs another build of muster",
        options.endpoint));
  }
  service.emplace(opened.pid());
  ring = SharedMemory::attach(opened.pid(), opened.fd(), static_cast<size_t>(opened.bytes()));
}

// Takes in what has arrived, waiting for the first message until `deadline`.
void DataClient::Impl::receive(Deadline deadline) {
  while (const auto envelope = client.receive(deadline)) {
    switch (envelope->body_case()) {
      case proto::Envelope::kBatchReady:
        answer(envelope->batch_ready().slot(), envelope->batch_ready().tag(), "");
        break;
      case proto::Envelope::kBatchFailed:
        answer(envelope->batch_failed().slot(), envelope->batch_failed().tag(),
               envelope->batch_failed().error());
        break;
      default:
        spdlog::warn("the data service sent a message that a worker does not take");
    }
    deadline = Deadline::now();
  }
}

void DataClient::Impl::answer(int slot, uint64_t tag, const std::string& error) {
  const auto found = std::find_if(requests.begin(), requests.end(),
                                  [&](const Request& r) { return r.tag == tag; });
  if (found == requests.end() || found->slot != slot || found->answered) {
    throw PeerError(
        fmt::format("the data service answered request {}, which is not outstanding", tag));
  }
  found->answered = true;
  found->error = error;
}

DataClient::DataClient(const DataClientOptions& options, const Security& security,
                       Deadline deadline) {
  MUSTER_CHECK(options.slots >= 1 && options.micro_batch >= 1 && options.sequence_length >= 1);
  impl_ = std::make_unique<Impl>(options, security);
  impl_->open(deadline);
}

DataClient::~DataClient() = default;

int DataClient::free_slots() const {
  return static_cast<int>(std::count(impl_->states.begin(), impl_->states.end(), SlotState::kFree));
}

int DataClient::outstanding() const {
  return static_cast<int>(impl_->requests.size());
}

void DataClient::request(Split split, std::span<const int64_t> ids) {
  MUSTER_CHECK(!ids.empty() && static_cast<int64_t>(ids.size()) <= impl_->options.micro_batch);
  const auto free = std::find(impl_->states.begin(), impl_->states.end(), SlotState::kFree);
  MUSTER_CHECK(free != impl_->states.end(), "no slot of the ring is free");
  const Request request{
      impl_->next_tag++, static_cast<int>(free - impl_->states.begin()), false, {}};
  proto::Envelope envelope;
  proto::BatchRequest& wish = *envelope.mutable_batch_request();
  wish.set_slot(request.slot);
  wish.set_tag(request.tag);
  wish.set_split(split == Split::kTrain ? proto::SPLIT_TRAIN : proto::SPLIT_HELD_OUT);
  wish.mutable_samples()->Add(ids.begin(), ids.end());
  // The queue holds more messages than a ring has slots, so it is full only when the service is
  // gone.
  impl_->client.send(std::move(envelope), Deadline::now());
  *free = SlotState::kRequested;
  impl_->requests.push_back(request);
}

const Batch& DataClient::next(Deadline deadline) {
  MUSTER_CHECK(!impl_->requests.empty(), "nothing was requested");
  const auto start = Deadline::Clock::now();
  while (!impl_->requests.front().answered) {
    impl_->receive(deadline.earlier(Deadline::after(kLookEvery)));
    if (impl_->requests.front().answered) break;
    const auto& options = impl_->options;
    if (!impl_->service->alive()) {
      throw PeerError(fmt::format("the data service (pid {}) at {} has died", impl_->service->pid(),
                                  options.endpoint));
    }
    if (deadline.passed()) {
      throw TimeoutError(fmt::format(
          "the data service (pid {}) at {} did not deliver a batch in time ({} outstanding)",
          impl_->service->pid(), options.endpoint, impl_->requests.size()));
    }
  }
  impl_->data_wait_s += std::chrono::duration<double>(Deadline::Clock::now() - start).count();
  const Request request = std::move(impl_->requests.front());
  impl_->requests.pop_front();
  const auto slot = static_cast<size_t>(request.slot);
  impl_->states[slot] = SlotState::kFree;
  if (!request.error.empty()) {
    throw DataError("the data service could not make a batch: " + request.error);
  }
  const char* memory = impl_->ring.data() + impl_->layout.bytes() * request.slot;
  impl_->batches[slot] = impl_->layout.batch(memory, request.tag);
  impl_->states[slot] = SlotState::kHeld;
  return impl_->batches[slot];
}

void DataClient::release(const Batch& batch) {
  const auto slot = static_cast<size_t>(&batch - impl_->batches.data());
  MUSTER_CHECK(slot < impl_->states.size() && impl_->states[slot] == SlotState::kHeld,
               "not a batch of this ring");
  impl_->states[slot] = SlotState::kFree;
}

double DataClient::data_wait_s() const {
  return impl_->data_wait_s;
}

}  // namespace muster
