#include "worker/coordinator_link.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "common/logging.h"
#include "common/protocol/assignment.h"
#include "common/protocol/heartbeat.h"
#include "common/signals.h"
#include "common/transport/transport.h"
#include "worker/comm/interrupt.h"

namespace muster {

namespace {

// More than the steps that are handed out at a time.
constexpr size_t kReportsKept = 64;

// Of a key "3/gloo/0": 3. No generation has number 0.
uint64_t generation_of(const std::string& key) {
  return std::strtoull(key.c_str(), nullptr, 10);
}

}  // namespace

struct CoordinatorLink::Impl {
  std::string endpoint;
  Client client;
  proto::Hello hello;
  proto::Welcome welcome;
  Waker waker;
  std::optional<SignalWatch> signals;
  bool leaving = false;  // the coordinator knows that we were asked to go

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<proto::Envelope> outgoing;
  std::deque<proto::Envelope> reported;  // the last ones, for a coordinator that is started anew
  std::optional<proto::Assignment> assignment;               // the newest, until it is taken
  std::map<uint64_t, std::deque<proto::PlannedStep>> steps;  // by generation
  uint64_t assigned = 0;    // generation of the newest assignment that came
  uint64_t begun = 0;       // the newest that may begin
  int64_t resume_step = 0;  // of that one, where it came with GoOver
  // Where the newest assignment says `prepare`: the generation that trains until then.
  std::optional<uint64_t> trains;
  uint64_t halted = 0;          // all up to this one
  bool halt_taken = true;       // by take_halt()
  std::set<uint64_t> given_up;  // by this process alone
  std::string halt_reason;
  std::string data_endpoint;
  std::map<int64_t, proto::CheckpointResult> checkpoints;
  std::map<std::string, std::string> values;
  std::optional<RunEnded> ended;
  Deadline::Clock::time_point last_heard = Deadline::Clock::now();
  bool gone = false;        // the coordinator, and that is why it ended
  uint64_t outlasting = 0;  // generation; 0: none
  struct Interrupted {
    uint64_t generation;
    std::weak_ptr<Interrupt> interrupt;
  };
  std::vector<Interrupted> interrupts;
  bool closing = false;
  std::thread thread;

  Impl(const std::string& address, const Security& security)
      : endpoint(address), client(address, security, "the coordinator") {}

  void run();
  void note_heard();
  void send_queued();
  void ask_to_leave();
  void take(proto::Envelope& envelope);
  void take_assignment(proto::Assignment newest);
  void take_halt(const proto::Halt& halt);
  void say_hello_again();
  void end(const RunEnded& why);
  void fire(const std::function<bool(uint64_t)>& concerns, const std::string& reason);
  std::optional<proto::PlannedStep> pop_step(uint64_t generation);

  bool replaced(uint64_t generation) const {
    return trains && *trains < generation && generation < assigned;
  }
  bool over(uint64_t generation) const {
    return generation <= halted || given_up.contains(generation) || replaced(generation);
  }
  // Waits, under the lock, until `ready`, the end of the run or that of the generation (0: none).
  template <typename Ready>
  void wait(std::unique_lock<std::mutex>& lock, std::optional<Deadline> deadline,
            uint64_t generation, const std::string& what, Ready ready) {
    const auto done = [&] {
      return ready() || ended.has_value() || (generation > 0 && over(generation));
    };
    if (deadline) {
      changed.wait_until(lock, deadline->at(), done);
    } else {
      changed.wait(lock, done);
    }
    if (ready()) return;
    if (gone) throw CoordinatorGone(ended->what());
    if (ended) throw *ended;
    if (done()) throw Halted(halt_reason);
    throw TimeoutError(fmt::format("no {} from the coordinator at {} in time", what, endpoint));
  }
};

void CoordinatorLink::Impl::run() {
  using Seconds = std::chrono::duration<double>;
  const Seconds interval(welcome.heartbeat_s());
  // A coordinator that was killed may be started anew.
  const Seconds patience(patience_s(welcome, welcome.heartbeat_s()));
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
        note_heard();
        take(*envelope);
      } else if (silence.passed()) {
        throw PeerError(fmt::format("the coordinator at {} has been silent for {:.1f} s", endpoint,
                                    patience.count()));
      }
    }
  } catch (const Error& error) {
    end(CoordinatorGone(error.what()));
  }
}

void CoordinatorLink::Impl::note_heard() {
  std::lock_guard lock(mutex);
  last_heard = Deadline::Clock::now();
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
    case proto::Envelope::kHalt:
      take_halt(envelope.halt());
      return;
    case proto::Envelope::kAssignment:
      take_assignment(std::move(*envelope.mutable_assignment()));
      return;
    case proto::Envelope::kHelloAgain:
      say_hello_again();
      return;
    case proto::Envelope::kHeartbeat:
    case proto::Envelope::kAccepted:
    case proto::Envelope::kWelcome:
      return;
    default:
      break;
  }
  {
    std::lock_guard lock(mutex);
    switch (envelope.body_case()) {
      case proto::Envelope::kGoOver:
        if (envelope.go_over().generation() <= halted) break;
        begun = envelope.go_over().generation();
        resume_step = envelope.go_over().resume_step();
        break;
      case proto::Envelope::kStepPlan: {
        const uint64_t generation = envelope.step_plan().generation();
        if (generation <= halted) break;
        for (auto& step : *envelope.mutable_step_plan()->mutable_steps()) {
          steps[generation].push_back(std::move(step));
        }
        break;
      }
      case proto::Envelope::kDataMoved:
        data_endpoint = envelope.data_moved().endpoint();
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

void CoordinatorLink::Impl::take_assignment(proto::Assignment newest) {
  const std::string reason = fmt::format("generation {} is prepared instead", newest.generation());
  bool replaces = false;
  {
    std::lock_guard lock(mutex);
    if (newest.generation() <= halted) return;
    const Place place = place_of(hello.member_id(), newest);
    if (!place.data_endpoint.empty()) data_endpoint = place.data_endpoint;
    assigned = newest.generation();
    trains.reset();
    if (newest.prepare()) {
      trains = newest.handover().generation();
      replaces = assigned > *trains + 1;
      if (replaces) halt_reason = reason;
    } else {
      begun = assigned;
    }
    assignment = std::move(newest);
  }
  changed.notify_all();
  if (replaces) fire([this](uint64_t generation) { return replaced(generation); }, reason);
}

// To a coordinator that was started anew. What was reported to the one before may be lost with it.
void CoordinatorLink::Impl::say_hello_again() {
  std::deque<proto::Envelope> again;
  again.emplace_back();
  *again.back().mutable_hello() = hello;
  {
    std::lock_guard lock(mutex);
    again.insert(again.end(), reported.begin(), reported.end());
  }
  for (proto::Envelope& envelope : again) {
    client.send(std::move(envelope), Deadline::after(std::chrono::seconds(5)));
  }
}

void CoordinatorLink::Impl::take_halt(const proto::Halt& halt) {
  {
    std::lock_guard lock(mutex);
    if (halt.generation() < halted) return;
    halted = halt.generation();
    halt_taken = false;
    halt_reason = halt.reason();
    if (assignment && assignment->generation() <= halted) assignment.reset();
    steps.erase(steps.begin(), steps.upper_bound(halted));
  }
  changed.notify_all();
  fire([last = halt.generation()](uint64_t generation) { return generation <= last; },
       halt.reason());
}

void CoordinatorLink::Impl::end(const RunEnded& why) {
  {
    std::lock_guard lock(mutex);
    if (ended) return;
    ended = why;
    gone = dynamic_cast<const CoordinatorGone*>(&why) != nullptr;
    if (gone) {
      std::erase_if(interrupts,
                    [&](const Interrupted& one) { return one.generation == outlasting; });
    }
  }
  changed.notify_all();
  fire([](uint64_t) { return true; }, why.what());
}

// What was to be interrupted at the end of these generations.
void CoordinatorLink::Impl::fire(const std::function<bool(uint64_t)>& concerns,
                                 const std::string& reason) {
  std::vector<std::shared_ptr<Interrupt>> concerned;
  {
    std::lock_guard lock(mutex);
    std::erase_if(interrupts, [&](const Interrupted& one) {
      if (!concerns(one.generation)) return one.interrupt.expired();
      if (auto interrupt = one.interrupt.lock()) concerned.push_back(std::move(interrupt));
      return true;
    });
  }
  for (const auto& interrupt : concerned) interrupt->fire(reason);
}

std::optional<proto::PlannedStep> CoordinatorLink::Impl::pop_step(uint64_t generation) {
  steps.erase(steps.begin(), steps.lower_bound(generation));
  const auto found = steps.find(generation);
  if (found == steps.end() || found->second.empty()) return std::nullopt;
  auto step = std::move(found->second.front());
  found->second.pop_front();
  return step;
}

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
