#include "worker/coordinator_link_impl.h"

#include <chrono>
#include <utility>

#include "common/logging.h"
#include "common/protocol/assignment.h"
#include "common/protocol/heartbeat.h"
#include "worker/comm/interrupt.h"

namespace muster {

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
  {
    std::lock_guard lock(mutex);
    if (newest.generation() <= halted) return;
    const Place place = place_of(hello.member_id(), newest);
    if (!place.data_endpoint.empty()) data_endpoint = place.data_endpoint;
    assigned = newest.generation();
    prepares = newest.prepare();
    if (prepares) {
      halt_reason = reason;
    } else {
      begun = assigned;
    }
    assignment = std::move(newest);
  }
  changed.notify_all();
  fire([this](uint64_t generation) { return replaced(generation); }, reason);
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

}  // namespace muster
