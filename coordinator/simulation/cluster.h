// A whole cluster in one process and one thread: a real Session with its RunLog, and simulated
// nodes, data services and workers around it, over a simulated network, in simulated time. From the
// same options and calls it does the same, message for message.
//
// What must hold at any moment is checked as it goes (checks.h); what does not throws Violation.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/config/config.h"
#include "common/files.h"
#include "coordinator/session.h"
#include "coordinator/simulation/agent.h"
#include "coordinator/simulation/collectives.h"
#include "coordinator/simulation/dice.h"
#include "coordinator/simulation/event_queue.h"
#include "coordinator/simulation/worker.h"

namespace muster::simulation {

constexpr const char* kFingerprint = "5eed";
// The hash of a sample's tokens, beside its id.
constexpr uint64_t kSampleHash = 1000;

class Violation : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct NetworkOptions {
  double latency_s = 0.0005;
  double slow_share = 0.0;  // of the messages, which take up to slow_s more; order is kept
  double slow_s = 0.0;
  double duplicate_share = 0.0;  // of the messages to the coordinator, which come twice
  double bandwidth = 1e9;        // bytes a second, of every process's link
};

// How long what takes: seconds.
struct Times {
  double step_s = 0.2;
  double mirror_s = 0.02;
  double mirror_memory_s = 0.0;  // to have it in a new generation, at most; 0: it is always there
  double connect_s = 0.03;
  double prepare_s = 0.3;  // to be prepared for a generation that follows one that trains, at most
  double failing_share = 0.0;  // of newcomers, who fail to be
  double crowded_share = 0.0;  // of the workers that cannot do it all beside that one
  double load_s = 0.1;
  double save_s = 0.05;
  double abort_s = 0.05;
  double start_s = 0.5;  // of a process, at most
  double scan_s = 0.5;   // of a data service, at most
  double state_bytes = 1e8;
};

struct ClusterOptions {
  Config config;  // run.dir is replaced
  uint64_t seed = 1;
  int expected_workers = 0;
  NetworkOptions network;
  Times times;
  int64_t train_samples = 1000;
  int64_t held_out_samples = 0;
  // The coordinator's CPU time, encoding and decoding included, passes in simulated time too.
  bool charge_coordinator = false;
  size_t kept_traces = 100;
};

// What happened, for people.
struct Trace {
  double time = 0.0;
  std::string text;
  proto::Envelope envelope;  // empty: no message
  std::string to_string() const;
};

class Cluster {
 public:
  explicit Cluster(const ClusterOptions& options);
  ~Cluster();

  // What may be done to the cluster, between its events.
  Agent* add_node(int workers);
  void kill(Process& process, const std::string& why);  // SIGKILL
  // Power loss: nobody learns of it but by silence.
  void cut_power(Agent& node);
  void stop_for(Process& process, double seconds);
  void cut_for(Agent& node, double seconds);
  // SIGSTOP of the coordinator, and SIGCONT: what is sent to it meanwhile waits.
  void stop_coordinator_for(double seconds);
  // An observer's message.
  void order(proto::Envelope envelope);

  // Runs what happens up to `time`. Returns early when the run is over.
  void run_until(double time);
  // Runs the next event. False: there is none, or the run is over.
  bool run_next();

  double now() const { return queue_.now(); }
  Session& session() { return *session_; }
  const RunDir& run() const { return run_; }
  const ClusterOptions& options() const { return options_; }
  Dice& dice() { return dice_; }
  std::vector<Agent*> nodes() const;
  std::vector<Worker*> workers() const;
  const std::vector<std::unique_ptr<Process>>& processes() const { return processes_; }
  // State that training must have after a step.
  uint64_t history(int64_t step);
  const std::vector<int64_t>& samples(int64_t step);
  const std::deque<Trace>& traces() const { return traces_; }
  // To the coordinator so far, without heartbeats.
  int64_t messages() const { return messages_; }
  double coordinator_cpu_s() const { return cpu_s_; }
  int64_t coordinator_bytes() const { return bytes_; }

  // For bench: called when a worker begins and ends a step of a generation, when the coordinator
  // has handled a message, and when it sends one.
  struct Watch {
    std::function<void(const Worker&, int64_t step)> step_begin;
    std::function<void(const Worker&, int64_t step)> step_end;
    std::function<void(const Process&, const proto::Envelope&)> received;
    std::function<void(const Process&, const proto::Envelope&, double departure)> sent;
  };
  Watch watch;
  // Kills whoever sends this message, counted from the first: odd seeds before it has left.
  int64_t kill_at_message = 0;

  // For the processes.
  EventQueue& queue() { return queue_; }
  Collectives& collectives() { return collectives_; }
  DataService* add_data_service(Agent& node);
  Worker* add_worker(Agent& node);
  void to_coordinator(Process& process, const proto::Envelope& envelope);
  void on_end(Process& process);
  void on_step_begin(const Worker& worker, int64_t step);
  void on_step_end(const Worker& worker, int64_t step);
  std::shared_ptr<const Roster> roster(uint64_t generation) const;
  double exchange_s(const Roster& roster) const;
  void save_shard(proto::ShardSaved* saved, int world, uint64_t history);
  uint64_t load_checkpoint(const proto::Assignment& assignment);
  void note(const std::string& what, const Process& process);
  void require(bool holds, const std::string& otherwise) const {
    if (!holds) throw Violation(otherwise);
  }

 private:
  struct Lane {
    double up = 0.0;
    double down = 0.0;
  };
  struct Incoming {
    Process* process;
    proto::Envelope envelope;
    std::string bytes;  // of charge_coordinator, in the place of the envelope
  };

  template <typename P, typename... Arguments>
  P* add(Arguments&&... arguments);
  std::string full_id(std::string id) const;
  bool send(const std::string& peer, const Message& message);
  double delay();
  void arrive(Incoming incoming);
  void serve();
  void run_session(const std::function<void()>& call);
  void arm_tick();
  void deliver(Process& process, const Message& message, double departure, size_t bytes);
  void record(const Message& message);
  void check_sent(const Process& process, const proto::Envelope& envelope);
  void check_assignment(const Process& process, const proto::Assignment& assignment);
  void check_resume_step(uint64_t generation, int64_t step) const;
  void check_plan(const Process& process, const proto::StepPlan& plan);
  void check_session();

  ClusterOptions options_;
  Dice dice_;
  TempDir dir_;
  RunDir run_;
  EventQueue queue_;
  Collectives collectives_;
  std::unique_ptr<RunLog> log_;
  std::unique_ptr<Session> session_;
  SampleOrder order_;

  std::vector<std::unique_ptr<Process>> processes_;
  std::unordered_map<std::string, Process*> by_id_;
  int32_t next_pid_ = 100;
  std::unordered_map<const Process*, Lane> lanes_;
  std::unordered_map<const Process*, bool> silent_;  // its node has lost power

  std::deque<Incoming> inbox_;
  bool serving_ = false;
  double busy_until_ = 0.0;
  double stopped_until_ = 0.0;
  double armed_ = -1.0;  // tick
  struct Outgoing {
    Process* process;
    Message message;
    size_t bytes;
  };
  std::vector<Outgoing> outbox_;
  double cpu_s_ = 0.0;
  int64_t messages_ = 0;
  int64_t bytes_ = 0;

  std::map<uint64_t, std::shared_ptr<Roster>> rosters_;
  uint64_t planned_generation_ = 0;
  int64_t committed_ = 0;
  int64_t saved_ = 0;  // newest checkpoint
  std::vector<std::vector<int64_t>> samples_;
  std::vector<uint64_t> histories_;
  std::deque<Trace> traces_;
};

}  // namespace muster::simulation
