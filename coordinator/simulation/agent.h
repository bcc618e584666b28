// The simulated node: its agent, which starts, restarts and kills, and its data service.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "coordinator/simulation/process.h"

namespace muster::simulation {

class DataService : public Process {
 public:
  using Process::Process;
  // Its sources are read, and the coordinator was told where it is reached.
  bool serving() const { return running() && !stopped() && serving_; }
  std::string endpoint() const { return "ipc://" + id(); }

 protected:
  void on_message(const proto::Envelope& envelope) override;
  void on_welcome() override;

 private:
  bool serving_ = false;
};

class Agent : public Process {
 public:
  Agent(Cluster& cluster, const std::string& id, int32_t pid, int workers)
      : Process(cluster, proto::ROLE_NODE, id, nullptr, pid), workers_(workers) {}

  // SIGTERM: asks the coordinator to let the node leave.
  void ask_to_leave(const std::string& reason);
  // A process of the node has ended.
  void on_child_end(Process& child);
  void start_workers(int count);
  // The one that runs, null: none.
  DataService* data() const { return data_ != nullptr && data_->running() ? data_ : nullptr; }
  const std::vector<Process*>& children() const { return children_; }
  bool leaving() const { return leaving_; }

  // Cut off from all other nodes; what is sent waits for mend().
  bool cut() const { return cut_; }
  void set_cut() { cut_ = true; }
  void hold(std::function<void()> call) { held_.push_back(std::move(call)); }
  void mend();

 protected:
  void on_message(const proto::Envelope& envelope) override;
  void fill(proto::Hello* hello) const override;
  void fill(proto::Heartbeat* heartbeat) const override { *heartbeat->mutable_load() = load(); }
  void on_welcome() override;
  void on_silence() override;

 private:
  proto::NodeLoad load() const;
  void start_data();
  double restart_delay(std::string* why_not);
  void finish_if_alone();

  const int workers_;
  DataService* data_ = nullptr;
  std::vector<Process*> children_;
  std::deque<double> crashes_;
  double set_aside_until_ = 0.0;
  int due_ = 0;    // workers that will be started anew before long
  int asked_ = 0;  // by all StartWorkers
  bool leaving_ = false;
  bool ending_ = false;
  bool ok_ = false;
  bool cut_ = false;
  std::vector<std::function<void()>> held_;
};

}  // namespace muster::simulation
