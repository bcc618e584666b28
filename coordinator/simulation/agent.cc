#include "coordinator/simulation/agent.h"

#include <algorithm>
#include <utility>

#include "coordinator/simulation/cluster.h"
#include "coordinator/simulation/worker.h"

namespace muster::simulation {

namespace {

constexpr double kBackoffS = 0.2;
const ExitStatus kKilled{true, 9};

}  // namespace

void DataService::on_welcome() {
  after(cluster_.dice().uniform(0.0, cluster_.options().times.scan_s), [this] {
    serving_ = true;
    proto::Envelope envelope;
    proto::DatasetReport* report = envelope.mutable_dataset_report();
    report->set_fingerprint(kFingerprint);
    report->set_train_samples(cluster_.options().train_samples);
    report->set_held_out_samples(cluster_.options().held_out_samples);
    report->set_vocab_size(256);
    report->set_endpoint(endpoint());
    say(envelope);
  });
}

void DataService::on_message(const proto::Envelope& envelope) {
  if (!envelope.has_stop()) return;
  expect_end();
  end({false, envelope.stop().ok() ? 0 : 1});
}

void Agent::on_welcome() {
  start_data();
  start_workers(workers_);
}

void Agent::fill(proto::Hello* hello) const {
  hello->set_workers(workers_);
  if (data_ != nullptr) *hello->mutable_load() = load();
}

proto::NodeLoad Agent::load() const {
  int workers = due_;
  for (const Process* child : children_) {
    workers += child->running() && child->role() == proto::ROLE_WORKER ? 1 : 0;
  }
  proto::NodeLoad load;
  load.set_workers(workers);
  load.set_asked(asked_);
  return load;
}

void Agent::start_data() {
  data_ = cluster_.add_data_service(*this);
  children_.push_back(data_);
  data_->start(cluster_.dice().uniform(0.0, cluster_.options().times.start_s));
}

void Agent::start_workers(int count) {
  for (int i = 0; i < count && running() && !ending_; ++i) {
    Worker* worker = cluster_.add_worker(*this);
    children_.push_back(worker);
    worker->start(cluster_.dice().uniform(0.0, cluster_.options().times.start_s));
  }
}

void Agent::ask_to_leave(const std::string& reason) {
  leaving_ = true;
  expect_end();
  proto::Envelope envelope;
  envelope.mutable_leaving()->set_reason(reason);
  say(envelope);
}

void Agent::on_message(const proto::Envelope& envelope) {
  if (envelope.has_start_workers()) {
    asked_ += envelope.start_workers().count();
    if (!leaving_) start_workers(envelope.start_workers().count());
  } else if (envelope.has_end_process()) {
    for (Process* child : children_) {
      if (child->id() == envelope.end_process().member_id()) child->end(kKilled);
    }
  } else if (envelope.has_stop()) {
    ending_ = true;
    ok_ = envelope.stop().ok();
    expect_end();
    for (Process* child : children_) {
      const auto& silent = envelope.stop().silent();
      if (std::find(silent.begin(), silent.end(), child->id()) != silent.end()) {
        child->end(kKilled);
      }
    }
    after(cluster_.options().config.elastic.shutdown_timeout_s, [this] {
      for (Process* child : children_) child->end(kKilled);
    });
    finish_if_alone();
  }
}

void Agent::on_silence() {
  ending_ = true;
  ok_ = false;
  for (Process* child : children_) child->end(kKilled);
  end({false, 1});
}

// Negative: it is not started again.
double Agent::restart_delay(std::string* why_not) {
  const ElasticConfig& elastic = cluster_.options().config.elastic;
  if (leaving_ || elastic.restarts == 0) return -1.0;
  while (!crashes_.empty() && crashes_.front() < cluster_.now() - elastic.restart_window_s) {
    crashes_.pop_front();
  }
  crashes_.push_back(cluster_.now());
  if (cluster_.now() >= set_aside_until_ &&
      static_cast<int64_t>(crashes_.size()) <= elastic.restarts) {
    return kBackoffS * static_cast<double>(crashes_.size());
  }
  *why_not = "too many crashes on " + id();
  set_aside_until_ = cluster_.now() + elastic.cool_down_s;
  return -1.0;
}

void Agent::on_child_end(Process& child) {
  if (ending_) return finish_if_alone();
  std::string why_not;
  const bool restart = !child.status().ok() && !child.end_expected();
  const double delay = restart ? restart_delay(&why_not) : -1.0;
  proto::Envelope envelope;
  proto::ProcessExited* exited = envelope.mutable_process_exited();
  exited->set_role(child.role());
  exited->set_member_id(child.id());
  exited->set_pid(child.pid());
  exited->set_host("host-" + id());
  exited->set_signalled(child.status().signalled);
  exited->set_code(child.status().code);
  exited->set_restart_in_s(delay);
  exited->set_no_restart(why_not);
  const bool soon = delay >= 0 && child.role() == proto::ROLE_WORKER;
  due_ += soon ? 1 : 0;
  *exited->mutable_load() = load();
  say(envelope);
  if (!restart || leaving_) return;
  const bool is_data = child.role() == proto::ROLE_DATA;
  const double again = delay >= 0 ? delay : cluster_.options().config.elastic.cool_down_s;
  after(again, [this, is_data, soon] {
    due_ -= soon ? 1 : 0;
    if (leaving_ || ending_) return;
    if (!is_data) {
      start_workers(1);
    } else if (data() == nullptr) {
      start_data();
    }
  });
}

void Agent::finish_if_alone() {
  const bool alone = std::none_of(children_.begin(), children_.end(),
                                  [](const Process* child) { return child->running(); });
  if (alone) end({false, ok_ ? 0 : 1});
}

void Agent::mend() {
  cut_ = false;
  for (const auto& call : std::exchange(held_, {})) call();
}

}  // namespace muster::simulation
