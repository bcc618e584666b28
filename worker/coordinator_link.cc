#include "worker/coordinator_link.h"

#include <fmt/format.h>

#include <chrono>
#include <cstdlib>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/protocol/heartbeat.h"
#include "worker/comm/interrupt.h"
#include "worker/coordinator_link_impl.h"

namespace muster {

namespace {

// More than the steps that are handed out at a time.
constexpr size_t kReportsKept = 64;

// Of a key "3/gloo/0": 3. No generation has number 0.
uint64_t generation_of(const std::string& key) {
  return std::strtoull(key.c_str(), nullptr, 10);
}

}  // namespace

CoordinatorLink::CoordinatorLink(const std::string& endpoint, const Security& security,
                                 const proto::Hello& hello, bool watch_signals, Deadline deadline)
    : impl_(std::make_unique<Impl>(endpoint, security)) {
  if (watch_signals) impl_->signals.emplace(impl_->waker);
  impl_->hello = hello;
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

void CoordinatorLink::interrupt_on_halt(uint64_t generation,
                                        const std::shared_ptr<Interrupt>& interrupt) {
  std::string reason;
  {
    std::lock_guard lock(impl_->mutex);
    if (!impl_->ended && !impl_->over(generation)) {
      impl_->interrupts.push_back({generation, interrupt});
      return;
    }
    reason = impl_->ended ? impl_->ended->what() : impl_->halt_reason;
  }
  interrupt->fire(reason);
}

void CoordinatorLink::outlast_coordinator(uint64_t generation) {
  std::lock_guard lock(impl_->mutex);
  impl_->outlasting = generation;
}

bool CoordinatorLink::coordinator_silent() const {
  std::lock_guard lock(impl_->mutex);
  const std::chrono::duration<double> silence = Deadline::Clock::now() - impl_->last_heard;
  return silence.count() > patience_s(impl_->welcome, impl_->welcome.heartbeat_s()) / 2;
}

std::vector<proto::Envelope> CoordinatorLink::recent_reports() const {
  std::lock_guard lock(impl_->mutex);
  return {impl_->reported.begin(), impl_->reported.end()};
}

void CoordinatorLink::send(proto::Envelope envelope) {
  {
    std::lock_guard lock(impl_->mutex);
    if (envelope.has_step_report() || envelope.has_eval_report()) {
      impl_->reported.push_back(envelope);
      if (impl_->reported.size() > kReportsKept) impl_->reported.pop_front();
    }
    impl_->outgoing.push_back(std::move(envelope));
  }
  impl_->waker.wake();
}

std::optional<proto::Assignment> CoordinatorLink::next_assignment() {
  std::unique_lock lock(impl_->mutex);
  impl_->wait(lock, std::nullopt, 0, "assignment",
              [&] { return impl_->assignment.has_value() || !impl_->halt_taken; });
  if (!impl_->halt_taken) return std::nullopt;
  return std::exchange(impl_->assignment, std::nullopt);
}

bool CoordinatorLink::assignment_waits() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->assignment.has_value() && impl_->halt_taken;
}

bool CoordinatorLink::is_left(uint64_t generation) const {
  std::lock_guard lock(impl_->mutex);
  return impl_->begun > generation;
}

int64_t CoordinatorLink::go_over(uint64_t generation) {
  std::unique_lock lock(impl_->mutex);
  impl_->wait(lock, std::nullopt, generation, "word to go over",
              [&] { return impl_->begun >= generation; });
  return impl_->resume_step;
}

bool CoordinatorLink::replaced(uint64_t generation) const {
  std::lock_guard lock(impl_->mutex);
  return impl_->replaced(generation);
}

std::optional<uint64_t> CoordinatorLink::take_halt() {
  std::lock_guard lock(impl_->mutex);
  if (std::exchange(impl_->halt_taken, true)) return std::nullopt;
  return impl_->halted;
}

bool CoordinatorLink::halted(uint64_t generation) const {
  std::lock_guard lock(impl_->mutex);
  return generation <= impl_->halted;
}

void CoordinatorLink::wait_for_halt(uint64_t generation, Deadline deadline) {
  std::unique_lock lock(impl_->mutex);
  impl_->wait(lock, deadline, 0, fmt::format("word on the end of generation {}", generation),
              [&] { return generation <= impl_->halted; });
}

void CoordinatorLink::give_up(uint64_t generation, const std::string& reason) {
  {
    std::lock_guard lock(impl_->mutex);
    if (impl_->over(generation)) return;
    impl_->given_up.insert(generation);
    impl_->halt_reason = reason;
  }
  impl_->changed.notify_all();
}

std::optional<proto::PlannedStep> CoordinatorLink::poll_step(uint64_t generation) {
  std::lock_guard lock(impl_->mutex);
  return impl_->pop_step(generation);
}

std::optional<proto::PlannedStep> CoordinatorLink::next_step(uint64_t generation) {
  std::unique_lock lock(impl_->mutex);
  std::optional<proto::PlannedStep> step;
  impl_->wait(lock, std::nullopt, generation, "step plan", [&] {
    if (impl_->over(generation)) return false;
    if (!step) step = impl_->pop_step(generation);
    return step.has_value() || impl_->begun > generation ||
           (impl_->assignment && impl_->assigned > generation);
  });
  return step;
}

proto::CheckpointResult CoordinatorLink::checkpoint_result(uint64_t generation, int64_t step,
                                                           Deadline deadline) {
  std::unique_lock lock(impl_->mutex);
  impl_->wait(lock, deadline, generation, fmt::format("word on the checkpoint of step {}", step),
              [&] { return impl_->checkpoints.contains(step); });
  return impl_->checkpoints.at(step);
}

int64_t CoordinatorLink::checkpoint_step() const {
  std::lock_guard lock(impl_->mutex);
  for (auto one = impl_->checkpoints.rbegin(); one != impl_->checkpoints.rend(); ++one) {
    if (one->second.committed()) return one->first;
  }
  return 0;
}

std::string CoordinatorLink::data_endpoint() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->data_endpoint;
}

std::string CoordinatorLink::data_endpoint_after(const std::string& old, uint64_t generation,
                                                 Deadline deadline) {
  std::unique_lock lock(impl_->mutex);
  impl_->wait(lock, deadline, generation, "word on the new data service",
              [&] { return impl_->data_endpoint != old; });
  return impl_->data_endpoint;
}

void CoordinatorLink::wait_for_end(Deadline deadline) {
  std::unique_lock lock(impl_->mutex);
  impl_->wait(lock, deadline, 0, "end of the run", [] { return false; });
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
  impl_->wait(lock, deadline, generation_of(key), "value of '" + key + "'",
              [&] { return impl_->values.contains(key); });
  auto node = impl_->values.extract(key);
  return std::move(node.mapped());
}

}  // namespace muster
