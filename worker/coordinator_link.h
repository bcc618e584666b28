// A worker's line to the coordinator: one background thread owns the socket, keeps heartbeats going
// while the worker computes, sorts what arrives into queues, and says at once when the run ends.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/deadline.h"
#include "common/error.h"
#include "worker/comm/communicator.h"

namespace muster {

class Interrupt;
struct Security;
namespace proto {
class Assignment;
class CheckpointResult;
class Envelope;
class Hello;
class PlannedStep;
class Welcome;
}  // namespace proto

// The coordinator ended the run (Stop), or cannot be reached any more. Thrown by every wait below.
class RunEnded : public Error {
 public:
  RunEnded(const std::string& reason, bool ok) : Error(reason, ok ? 0 : 1) {}
};

// It is silent for longer than members go on without one: nobody can commit what they do.
class CoordinatorGone : public RunEnded {
 public:
  explicit CoordinatorGone(const std::string& reason) : RunEnded(reason, false) {}
};

// The coordinator broke the generation off (Halt). Thrown by every wait that belongs to it.
class Halted : public PeerError {
 public:
  using PeerError::PeerError;
};

// All members may be called from any thread. As a Store it is the rendezvous of the communicators:
// keys begin with their generation, "3/…", and waits for them end with it.
//
// Waits without a deadline are for what may be long in coming by its nature; the coordinator's
// silence ends them, with RunEnded.
class CoordinatorLink : public Store {
 public:
  // Says hello and waits for the welcome. Throws TimeoutError, or PeerError when refused. With
  // `watch_signals`, SIGTERM, SIGINT or SIGUSR1 to this process become the wish to leave (Leaving),
  // which the coordinator grants at a step boundary.
  CoordinatorLink(const std::string& endpoint, const Security& security, const proto::Hello& hello,
                  bool watch_signals, Deadline deadline);
  ~CoordinatorLink() override;

  const proto::Welcome& welcome() const;
  // Host of the coordinator, "" on ipc: where the data plane's route leads.
  std::string coordinator_host() const;

  // Fires `interrupt` when the generation is broken off or the run ends (at once if it has), from
  // the link's thread.
  void interrupt_on_halt(uint64_t generation, const std::shared_ptr<Interrupt>& interrupt);

  // From now on the coordinator's silence does not interrupt this generation: the steps that are
  // planned are trained to their end.
  void outlast_coordinator(uint64_t generation);
  // For half of the time after which it is gone, at least.
  bool coordinator_silent() const;

  // Queues a message.
  void send(proto::Envelope envelope);
  // The last reports of steps and evaluations, in their order.
  std::vector<proto::Envelope> recent_reports() const;
  // The newest generation to join, of those that were not taken yet and not broken off. Nullopt
  // when a Halt came that take_halt() has not given out.
  std::optional<proto::Assignment> next_assignment();
  // Whether next_assignment() has one.
  bool assignment_waits() const;
  // Whether all that is planned of the generation is here, as a newer one begins.
  bool is_left(uint64_t generation) const;
  // Waits until the generation, whose assignment says `prepare`, may begin; the step that it goes
  // on from. Throws Halted where it was broken off or replaced by a newer one.
  int64_t go_over(uint64_t generation);
  // A newer assignment came before it could begin.
  bool replaced(uint64_t generation) const;
  // The generation up to which all are broken off, once for each Halt.
  std::optional<uint64_t> take_halt();
  bool halted(uint64_t generation) const;
  // Returns when the generation is broken off.
  void wait_for_halt(uint64_t generation, Deadline deadline);
  // Ends the waits of this process that belong to the generation, as if that alone had been broken
  // off; halted() and take_halt() do not tell of it.
  void give_up(uint64_t generation, const std::string& reason);

  // The next planned step of the generation, if it is there already. What is left of older ones is
  // dropped.
  std::optional<proto::PlannedStep> poll_step(uint64_t generation);
  // Waits for it; nullopt when there is none, and a newer assignment waits to be taken or begins.
  std::optional<proto::PlannedStep> next_step(uint64_t generation);
  // The fate of the checkpoint of `step`.
  proto::CheckpointResult checkpoint_result(uint64_t generation, int64_t step, Deadline deadline);
  // The newest that is known to be whole; 0: none.
  int64_t checkpoint_step() const;
  // Waits for the end of the run and returns nothing: throws RunEnded or TimeoutError.
  [[noreturn]] void wait_for_end(Deadline deadline);

  // Where the node's data service is, as far as the coordinator has told: the newest word counts.
  std::string data_endpoint() const;
  // Waits until it is another one than `old`.
  std::string data_endpoint_after(const std::string& old, uint64_t generation, Deadline deadline);

  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, Deadline deadline) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace muster
