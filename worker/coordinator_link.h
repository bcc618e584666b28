// A worker's line to the coordinator: one background thread owns the socket, keeps heartbeats going
// while the worker computes, sorts what arrives into queues, and says at once when the run ends.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "common/deadline.h"
#include "common/error.h"
#include "worker/comm/communicator.h"

namespace muster {

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

// All members may be called from any thread. As a Store it is the rendezvous of the communicator.
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

  // Called once when the run ends (at once if it has), from the link's thread; for aborting what
  // the worker is blocked in. Replaces the callback before, which neither runs nor is kept any more
  // when this returns (a running one is waited for, up to ten seconds). Not from inside a callback.
  void on_end(std::function<void(const std::string& reason)> callback);

  // Queues a message.
  void send(proto::Envelope envelope);
  // The next generation to join. Drops steps planned for earlier ones.
  proto::Assignment next_assignment(Deadline deadline);
  // The next planned step, if it is there already.
  std::optional<proto::PlannedStep> poll_step();
  // Waits for it. Throws TimeoutError.
  proto::PlannedStep next_step(Deadline deadline);
  // The fate of the checkpoint of `step`.
  proto::CheckpointResult checkpoint_result(int64_t step, Deadline deadline);
  // Waits for the end of the run and returns nothing: throws RunEnded or TimeoutError.
  [[noreturn]] void wait_for_end(Deadline deadline);

  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, Deadline deadline) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace muster
