#include "worker/coordinator_link.h"

#include <fmt/format.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "common/logging.h"
#include "common/signals.h"
#include "common/transport/transport.h"

namespace muster {

namespace {

// Heartbeats that may be missed before the coordinator counts as gone.
constexpr double kMissedHeartbeats = 5.0;

}  // namespace

struct CoordinatorLink::Impl {
  std::string endpoint;
  Client client;
  proto::Welcome welcome;
  Waker waker;
  std::optional<SignalWatch> signals;
  bool leaving = false;  // the coordinator knows that we were asked to go

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<proto::Envelope> outgoing;
  std::deque<proto::Assignment> assignments;
  std::deque<proto::PlannedStep> steps;
  uint64_t generation = 0;
  std::map<int64_t, proto::CheckpointResult> checkpoints;
  std::map<std::string, std::string> values;
  std::optional<RunEnded> ended;
  std::function<void(const std::string&)> end_callback;
  bool calling = false;  // it, on this object's thread
  bool closing = false;
  std::thread thread;

  Impl(const std::string& address, const Security& security)
      : endpoint(address), client(address, security, "the coordinator") {}

  void run();
  void send_queued();
  void ask_to_leave();
  void take(proto::Envelope& envelope);
  void end(const RunEnded& why);

  // Waits, under the lock, until `ready` or the end of the run.
  template <typename Ready>
  void wait(std::unique_lock<std::mutex>& lock, Deadline deadline, const std::string& what,
            Ready ready) {
    changed.wait_until(lock, deadline.at(), [&] { return ready() || ended.has_value(); });
    if (ready()) return;
    if (ended) throw *ended;
    throw TimeoutError(fmt::format("no {} from the coordinator at {} in time", what, endpoint));
  }
};

void CoordinatorLink::Impl::run() {
  using Seconds = std::chrono::duration<double>;
  const Seconds interval(welcome.heartbeat_s());
  const Seconds patience = interval * kMissedHeartbeats;
  Deadline next_heartbeat = Deadline::now();
  Deadline silence = Deadline::after(patience);
  try {
    while (true) {
      {
        std::lock_guard lock(mutex);
        if (closing) return;
      }
      ask_to_leave();
      send_queued();
      if (next_heartbeat.passed()) {
        proto::Envelope beat;
        beat.mutable_heartbeat();
        client.send(std::move(beat), Deadline::after(patience));
        next_heartbeat = Deadline::after(interval);
      }
      auto envelope = client.receive(next_heartbeat.earlier(silence), &waker);
      waker.clear();
      if (envelope) {
        silence = Deadline::after(patience);
        take(*envelope);
      } else if (silence.passed()) {
        throw PeerError(fmt::format("the coordinator at {} has been silent for {:.1f} s", endpoint,
                                    patience.count()));
      }
    }
  } catch (const Error& error) {
    end(RunEnded(error.what(), false));
  }
}

void CoordinatorLink::Impl::ask_to_leave() {
  if (!signals || leaving) return;
  if (signals->terminations() + signals->interrupts() + signals->user_signals() == 0) return;
  leaving = true;
  proto::Envelope envelope;
  envelope.mutable_leaving()->set_reason(signals->terminations() > 0 ? "SIGTERM"
                                         : signals->interrupts() > 0 ? "SIGINT"
                                                                     : "SIGUSR1");
  client.send(std::move(envelope), Deadline::after(std::chrono::seconds(5)));
}

void CoordinatorLink::Impl::send_queued() {
  while (true) {
    proto::Envelope envelope;
    {
      std::lock_guard lock(mutex);
      if (outgoing.empty()) return;
      envelope = std::move(outgoing.front());
      outgoing.pop_front();
    }
    client.send(std::move(envelope), Deadline::after(std::chrono::seconds(5)));
  }
}

void CoordinatorLink::Impl::take(proto::Envelope& envelope) {
  switch (envelope.body_case()) {
    case proto::Envelope::kStop:
      end(RunEnded(envelope.stop().reason(), envelope.stop().ok()));
      return;
    case proto::Envelope::kHeartbeat:
    case proto::Envelope::kAccepted:
      return;
    default:
      break;
  }
  {
    std::lock_guard lock(mutex);
    switch (envelope.body_case()) {
      case proto::Envelope::kAssignment:
        generation = envelope.assignment().generation();
        steps.clear();
        assignments.push_back(std::move(*envelope.mutable_assignment()));
        break;
      case proto::Envelope::kStepPlan:
        if (envelope.step_plan().generation() == generation) {
          for (auto& step : *envelope.mutable_step_plan()->mutable_steps())
            steps.push_back(std::move(step));
        }
        break;
      case proto::Envelope::kCheckpointResult:
        checkpoints[envelope.checkpoint_result().step()] = envelope.checkpoint_result();
        break;
      case proto::Envelope::kStoreValue:
        values[envelope.store_value().key()] = envelope.store_value().value();
        break;
      default:
        spdlog::warn("unexpected message from the coordinator (case {})",
                     static_cast<int>(envelope.body_case()));
    }
  }
  changed.notify_all();
}

void CoordinatorLink::Impl::end(const RunEnded& why) {
  std::function<void(const std::string&)> callback;
  {
    std::lock_guard lock(mutex);
    if (ended) return;
    ended = why;
    callback = std::exchange(end_callback, nullptr);
    calling = true;
  }
  changed.notify_all();
  if (callback) callback(why.what());
  callback = nullptr;  // what it holds is given up before on_end() returns
  {
    std::lock_guard lock(mutex);
    calling = false;
  }
  changed.notify_all();
}

CoordinatorLink::CoordinatorLink(const std::string& endpoint, const Security& security,
                                 const proto::Hello& hello, bool watch_signals, Deadline deadline)
    : impl_(std::make_unique<Impl>(endpoint, security)) {
  if (watch_signals) impl_->signals.emplace(impl_->waker);
  proto::Envelope envelope;
  *envelope.mutable_hello() = hello;
  auto reply = impl_->client.call(std::move(envelope), deadline);
  if (!reply.has_welcome()) {
    throw PeerError(fmt::format(
        "the coordinator at {} answered Hello with something else than Welcome", endpoint));
  }
  impl_->welcome = std::move(*reply.mutable_welcome());
  impl_->thread = std::thread([this] { impl_->run(); });
}

CoordinatorLink::~CoordinatorLink() {
  {
    std::lock_guard lock(impl_->mutex);
    impl_->closing = true;
  }
  impl_->waker.wake();
  impl_->thread.join();
}

const proto::Welcome& CoordinatorLink::welcome() const {
  return impl_->welcome;
}

std::string CoordinatorLink::coordinator_host() const {
  const std::string scheme = "tcp://";
  if (!impl_->endpoint.starts_with(scheme)) return "";
  const auto colon = impl_->endpoint.rfind(':');
  return impl_->endpoint.substr(scheme.size(), colon - scheme.size());
}

void CoordinatorLink::on_end(std::function<void(const std::string&)> callback) {
  // What an earlier callback holds must not outlive what the caller destroys next.
  constexpr std::chrono::seconds kLongestCallback(10);
  std::unique_lock lock(impl_->mutex);
  impl_->changed.wait_for(lock, kLongestCallback, [this] { return !impl_->calling; });
  if (impl_->ended) {
    const std::string reason = impl_->ended->what();
    lock.unlock();
    if (callback) callback(reason);
    return;
  }
  impl_->end_callback = std::move(callback);
}

void CoordinatorLink::send(proto::Envelope envelope) {
  {
    std::lock_guard lock(impl_->mutex);
    impl_->outgoing.push_back(std::move(envelope));
  }
  impl_->waker.wake();
}

proto::Assignment CoordinatorLink::next_assignment(Deadline deadline) {
  std::unique_lock lock(impl_->mutex);
  impl_->wait(lock, deadline, "assignment", [&] { return !impl_->assignments.empty(); });
  auto assignment = std::move(impl_->assignments.front());
  impl_->assignments.pop_front();
  return assignment;
}

std::optional<proto::PlannedStep> CoordinatorLink::poll_step() {
  std::lock_guard lock(impl_->mutex);
  if (impl_->steps.empty()) return std::nullopt;
  auto step = std::move(impl_->steps.front());
  impl_->steps.pop_front();
  return step;
}

proto::PlannedStep CoordinatorLink::next_step(Deadline deadline) {
  std::unique_lock lock(impl_->mutex);
  impl_->wait(lock, deadline, "step plan", [&] { return !impl_->steps.empty(); });
  auto step = std::move(impl_->steps.front());
  impl_->steps.pop_front();
  return step;
}

proto::CheckpointResult CoordinatorLink::checkpoint_result(int64_t step, Deadline deadline) {
  std::unique_lock lock(impl_->mutex);
  impl_->wait(lock, deadline, fmt::format("word on the checkpoint of step {}", step),
              [&] { return impl_->checkpoints.contains(step); });
  return impl_->checkpoints.at(step);
}

void CoordinatorLink::wait_for_end(Deadline deadline) {
  std::unique_lock lock(impl_->mutex);
  impl_->wait(lock, deadline, "end of the run", [] { return false; });
  MUSTER_CHECK(false, "wait() throws unless its condition holds");
}

void CoordinatorLink::set(const std::string& key, const std::string& value) {
  proto::Envelope envelope;
  envelope.mutable_store_set()->set_key(key);
  envelope.mutable_store_set()->set_value(value);
  send(std::move(envelope));
}

std::string CoordinatorLink::get(const std::string& key, Deadline deadline) {
  proto::Envelope envelope;
  envelope.mutable_store_get()->set_key(key);
  send(std::move(envelope));
  std::unique_lock lock(impl_->mutex);
  impl_->wait(lock, deadline, "value of '" + key + "'",
              [&] { return impl_->values.contains(key); });
  auto node = impl_->values.extract(key);
  return std::move(node.mapped());
}

}  // namespace muster
