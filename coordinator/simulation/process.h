// A process of the simulated cluster: takes messages, has timers, sends heartbeats, can be stopped,
// killed, or end. What it does besides is its subclass's.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/process.h"
#include "common/protocol/muster.pb.h"
#include "common/transport/transport.h"

namespace muster::simulation {

class Agent;
class Cluster;

class Process {
 public:
  // `agent`: of its node; null for an agent itself. The cluster owns it, and keeps it to its end.
  Process(Cluster& cluster, proto::Role role, std::string id, Agent* agent, int32_t pid);
  virtual ~Process() = default;

  // Says hello after so long.
  void start(double delay);
  // A message from the coordinator.
  void receive(const Message& message);
  // SIGSTOP, and SIGCONT after so long.
  void stop_for(double seconds);
  // Ends it, as it is or by a signal.
  void end(const ExitStatus& status);

  const std::string& id() const { return id_; }
  proto::Role role() const { return role_; }
  Agent* agent() const { return agent_; }
  int32_t pid() const { return pid_; }
  bool running() const { return running_; }
  bool stopped() const { return stopped_; }
  bool welcomed() const { return welcomed_; }
  double ended_at() const { return ended_at_; }
  const ExitStatus& status() const { return status_; }
  // Was asked to leave, or ends with the run: its exit status tells nothing.
  void expect_end() { end_expected_ = true; }
  bool end_expected() const { return end_expected_; }
  // It was stopped, or its node was cut off: others may have taken it for lost.
  void disturb() { disturbed_ = true; }
  bool disturbed() const;

  // Calls back after so long, unless the process has ended; later while it is stopped.
  void after(double delay, std::function<void()> call);

 protected:
  void say(const proto::Envelope& envelope);
  virtual void on_message(const proto::Envelope& envelope) = 0;
  // More in the hello, and what follows the first welcome.
  virtual void fill(proto::Hello*) const {}
  virtual void fill(proto::Heartbeat*) const {}
  virtual void on_welcome() {}
  virtual void on_silence() { end({false, 1}); }

  Cluster& cluster_;

 private:
  void take(const proto::Envelope& envelope);
  void beat();

  const proto::Role role_;
  const std::string id_;
  Agent* const agent_;
  const int32_t pid_;
  bool running_ = true;
  bool stopped_ = false;
  bool welcomed_ = false;
  bool end_expected_ = false;
  bool disturbed_ = false;
  uint64_t stops_ = 0;
  double last_heard_ = 0.0;
  double ended_at_ = 0.0;
  ExitStatus status_;
  // What came while it was stopped: messages are looked at before timers.
  std::vector<Message> inbox_;
  std::vector<std::function<void()>> late_;
};

}  // namespace muster::simulation
