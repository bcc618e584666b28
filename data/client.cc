#include "data/client.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <memory>
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
// A service that was told of answers at once.
constexpr std::chrono::seconds kOpenWithin{2};

enum class SlotState : uint8_t { kFree, kRequested, kHeld };

struct Request {
  uint64_t tag;
  int slot;
  Split split;
  std::vector<int64_t> ids;
  bool answered = false;
  std::string error;
};

// To one data service. Its ring stays mapped as long as a batch in it is held, also when the
// service has died.
struct Connection {
  Connection(const std::string& where, const Security& security)
      : endpoint(where), client(where, security, "the data service") {}

  const std::string endpoint;
  Client client;
  std::optional<PeerProcess> service;
  SharedMemory ring;
};

}  // namespace

struct DataClient::Impl {
  Impl(const DataClientOptions& wish, const Security& key)
      : options(wish),
        security(key),
        layout(options.micro_batch, options.sequence_length),
        states(static_cast<size_t>(options.slots), SlotState::kFree),
        batches(states.size()),
        held_in(states.size()) {}

  void open(const std::string& endpoint, Deadline deadline);
  void open_successor(const std::string& old, Deadline deadline);
  void move(Deadline deadline);
  void ask(const Request& request);
  void receive(Deadline deadline);
  void answer(int slot, uint64_t tag, const std::string& error);

  const DataClientOptions options;
  const Security security;
  const SlotLayout layout;
  std::shared_ptr<Connection> connection;
  std::vector<SlotState> states;
  std::vector<Batch> batches;                        // of the held slots
  std::vector<std::shared_ptr<Connection>> held_in;  // where they lie
  std::deque<Request> requests;                      // oldest first
  uint64_t next_tag = 1;
  double data_wait_s = 0;
};

void DataClient::Impl::open(const std::string& endpoint, Deadline deadline) {
  const auto opening = std::make_shared<Connection>(endpoint, security);
  proto::Envelope envelope;
  proto::OpenRing& wish = *envelope.mutable_open_ring();
  wish.set_member_id(options.member_id);
  wish.set_pid(::getpid());
  wish.set_slots(options.slots);
  wish.set_micro_batch(static_cast<int32_t>(options.micro_batch));
  wish.set_sequence_length(static_cast<int32_t>(options.sequence_length));
  const proto::Envelope reply = opening->client.call(std::move(envelope), deadline);
  const proto::RingOpened& opened = reply.ring_opened();
  if (!reply.has_ring_opened() || opened.slots() != options.slots ||
      opened.slot_bytes() != layout.bytes() || opened.bytes() != layout.bytes() * options.slots) {
    throw PeerError(fmt::format(
        "the data service at {} opened a ring of another layout: it runs another build of muster",
        endpoint));
  }
  opening->service.emplace(opened.pid());
  opening->ring =
      SharedMemory::attach(opened.pid(), opened.fd(), static_cast<size_t>(opened.bytes()));
  connection = opening;
}

// The one that is told of may be gone as well by now: then another one will be told of.
void DataClient::Impl::open_successor(const std::string& old, Deadline deadline) {
  while (true) {
    const std::string endpoint = options.successor(old, deadline);
    try {
      return open(endpoint, deadline.earlier(Deadline::after(kOpenWithin)));
    } catch (const TimeoutError&) {
      if (deadline.passed()) throw;
    }
    if (options.check) options.check();
  }
}

void DataClient::Impl::move(Deadline deadline) {
  spdlog::warn("the data service (pid {}) at {} has died: waiting for another one",
               connection->service->pid(), connection->endpoint);
  open_successor(connection->endpoint, deadline);
  for (Request& request : requests) {
    request.answered = false;
    request.error.clear();
    ask(request);
  }
}

void DataClient::Impl::ask(const Request& request) {
  proto::Envelope envelope;
  proto::BatchRequest& wish = *envelope.mutable_batch_request();
  wish.set_slot(request.slot);
  wish.set_tag(request.tag);
  wish.set_split(request.split == Split::kTrain ? proto::SPLIT_TRAIN : proto::SPLIT_HELD_OUT);
  wish.mutable_samples()->Add(request.ids.begin(), request.ids.end());
  // The queue holds more messages than a ring has slots, so it is full only when the service is
  // gone.
  connection->client.send(std::move(envelope), Deadline::now());
}

// Takes in what has arrived, waiting for the first message until `deadline`.
void DataClient::Impl::receive(Deadline deadline) {
  while (const auto envelope = connection->client.receive(deadline)) {
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
  if (options.successor) {
    impl_->open_successor("", deadline);
  } else {
    impl_->open(options.endpoint, deadline);
  }
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
  impl_->requests.push_back({.tag = impl_->next_tag++,
                             .slot = static_cast<int>(free - impl_->states.begin()),
                             .split = split,
                             .ids = {ids.begin(), ids.end()},
                             .error = {}});
  *free = SlotState::kRequested;
  impl_->ask(impl_->requests.back());
}

const Batch& DataClient::next(Deadline deadline) {
  MUSTER_CHECK(!impl_->requests.empty(), "nothing was requested");
  const auto start = Deadline::Clock::now();
  while (!impl_->requests.front().answered) {
    impl_->receive(deadline.earlier(Deadline::after(kLookEvery)));
    if (impl_->requests.front().answered) break;
    if (impl_->options.check) impl_->options.check();
    const Connection& connection = *impl_->connection;
    if (!connection.service->alive()) {
      if (impl_->options.successor) {
        impl_->move(deadline);
        continue;
      }
      throw PeerError(fmt::format("the data service (pid {}) at {} has died",
                                  connection.service->pid(), connection.endpoint));
    }
    if (deadline.passed()) {
      throw TimeoutError(fmt::format(
          "the data service (pid {}) at {} did not deliver a batch in time ({} outstanding)",
          connection.service->pid(), connection.endpoint, impl_->requests.size()));
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
  const char* memory = impl_->connection->ring.data() + impl_->layout.bytes() * request.slot;
  impl_->batches[slot] = impl_->layout.batch(memory, request.tag);
  impl_->states[slot] = SlotState::kHeld;
  impl_->held_in[slot] = impl_->connection;
  return impl_->batches[slot];
}

void DataClient::release(const Batch& batch) {
  const auto slot = static_cast<size_t>(&batch - impl_->batches.data());
  MUSTER_CHECK(slot < impl_->states.size() && impl_->states[slot] == SlotState::kHeld,
               "not a batch of this ring");
  impl_->states[slot] = SlotState::kFree;
  impl_->held_in[slot] = nullptr;
}

double DataClient::data_wait_s() const {
  return impl_->data_wait_s;
}

}  // namespace muster
