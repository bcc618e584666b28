// What CoordinatorLink keeps, and the thread that owns its socket.
#pragma once

#include <fmt/format.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "common/protocol/muster.pb.h"
#include "common/signals.h"
#include "common/transport/transport.h"
#include "worker/coordinator_link.h"

namespace muster {

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
  uint64_t assigned = 0;        // generation of the newest assignment that came
  uint64_t begun = 0;           // the newest that may begin
  int64_t resume_step = 0;      // of that one, where it came with GoOver
  bool prepares = false;        // what the newest assignment says
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
    return prepares && begun < generation && generation < assigned;
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

}  // namespace muster
