#include "coordinator/simulation/process.h"

#include <utility>

#include "coordinator/membership.h"
#include "coordinator/simulation/agent.h"
#include "coordinator/simulation/cluster.h"

namespace muster::simulation {

Process::Process(Cluster& cluster, proto::Role role, std::string id, Agent* agent, int32_t pid)
    : cluster_(cluster), role_(role), id_(std::move(id)), agent_(agent), pid_(pid) {}

bool Process::disturbed() const {
  return disturbed_ || (agent_ != nullptr && agent_->disturbed());
}

void Process::start(double delay) {
  after(delay, [this] {
    last_heard_ = cluster_.now();
    proto::Envelope envelope;
    envelope.set_request_id(1);
    proto::Hello* hello = envelope.mutable_hello();
    hello->set_role(role_);
    hello->set_member_id(id_);
    hello->set_node_id(agent_ == nullptr ? id_ : agent_->id());
    hello->set_host("host-" + hello->node_id());
    hello->set_pid(pid_);
    fill(hello);
    say(envelope);
    beat();
  });
}

void Process::after(double delay, std::function<void()> call) {
  cluster_.queue().at(cluster_.now() + delay, [this, call = std::move(call)] {
    if (!running_) return;
    if (stopped_) {
      late_.push_back(call);
    } else {
      call();
    }
  });
}

void Process::beat() {
  const double interval = cluster_.options().config.elastic.heartbeat_s;
  if (cluster_.now() - last_heard_ > kMissedHeartbeats * interval) return on_silence();
  proto::Envelope envelope;
  fill(envelope.mutable_heartbeat());
  say(envelope);
  after(interval, [this] { beat(); });
}

void Process::say(const proto::Envelope& envelope) {
  if (running_) cluster_.to_coordinator(*this, envelope);
}

void Process::receive(const Message& message) {
  if (!running_) return;
  if (stopped_) {
    inbox_.push_back(message);
  } else {
    take(message.envelope());
  }
}

void Process::take(const proto::Envelope& envelope) {
  last_heard_ = cluster_.now();
  if (envelope.has_refused()) return end({false, 1});
  if (envelope.has_welcome()) {
    if (!std::exchange(welcomed_, true)) on_welcome();
  } else if (!envelope.has_heartbeat()) {
    on_message(envelope);
  }
}

void Process::stop_for(double seconds) {
  if (!running_) return;
  stopped_ = true;
  cluster_.queue().at(cluster_.now() + seconds, [this, mine = ++stops_] {
    if (!running_ || mine != stops_) return;
    stopped_ = false;
    cluster_.note("continues", *this);
    for (const Message& message : std::exchange(inbox_, {})) {
      if (running_) take(message.envelope());
    }
    for (const auto& call : std::exchange(late_, {})) {
      if (running_) call();
    }
  });
}

void Process::end(const ExitStatus& status) {
  if (!running_) return;
  running_ = false;
  status_ = status;
  ended_at_ = cluster_.now();
  inbox_.clear();
  late_.clear();
  cluster_.on_end(*this);
}

}  // namespace muster::simulation
