// How long a change of size takes, and how many workers one coordinator can serve: a real Session
// with its journal in a simulated cluster (coordinator/simulation/). Time is simulated but for the
// coordinator's, which is the CPU time that it takes here to decode, decide, log and encode; its
// sockets are not in it (`muster bench control` has those).
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <functional>
#include <map>
#include <string>

#include "common/error.h"
#include "coordinator/simulation/cluster.h"
#include "tools/muster/bench.h"

namespace muster {
namespace {

using simulation::Agent;
using simulation::Cluster;
using simulation::ClusterOptions;
using simulation::Process;
using simulation::Worker;

constexpr int kOnNode = 8;
constexpr double kLatencyS = 50e-6;
constexpr double kBandwidth = 10e9;       // bytes a second, each process's link
constexpr double kStateOfWorker = 100e6;  // bytes that each hands over
constexpr double kStepS = 0.5;
constexpr double kConnectS = 0.03;
constexpr double kAbortS = 0.05;
constexpr int kSteadySteps = 6;
constexpr double kMilliseconds = 1e3;

ClusterOptions options_for(int workers) {
  ClusterOptions options;
  options.charge_coordinator = true;
  options.expected_workers = workers;
  options.train_samples = 1'000'000;
  Config& config = options.config;
  config.run.name = "bench";
  config.run.device = "cpu";
  config.train.steps = 100'000;
  config.train.global_batch = 2L * workers;
  config.elastic.join_window_s = 0.0;
  config.elastic.mirror_every = 1;
  config.elastic.restarts = 0;
  options.network.latency_s = kLatencyS;
  options.network.bandwidth = kBandwidth;
  options.times.step_s = kStepS;
  options.times.connect_s = kConnectS;
  options.times.abort_s = kAbortS;
  options.times.state_bytes = kStateOfWorker * workers;
  return options;
}

class ElasticBench {
 public:
  explicit ElasticBench(int workers) : cluster_(options_for(workers)), workers_(workers) {
    cluster_.watch = {
        .step_begin = [this](const Worker& worker, int64_t) { on_begin(worker); },
        .step_end = [this](const Worker& worker, int64_t) { ended_[worker.generation()] = now(); },
        .received = [this](const Process& from,
                           const proto::Envelope& message) { on_received(from, message); },
        .sent = [this](const Process&, const proto::Envelope& message,
                       double departure) { on_sent(message, departure); },
    };
    for (int i = 0; i < workers; i += kOnNode) cluster_.add_node(kOnNode);
  }

  std::vector<BenchResult> run() {
    std::vector<BenchResult> results;
    reach(1);
    steady(&results);
    grow(&results);
    shrink(&results);
    crash(&results);
    return results;
  }

 private:
  double now() const { return cluster_.now(); }

  void on_begin(const Worker& worker) {
    const uint64_t generation = worker.generation();
    // The first step of everybody in it.
    if (first_steps_[generation]++ < members(generation)) begun_[generation] = now();
  }
  void on_received(const Process& from, const proto::Envelope& message) {
    ++received_;
    if (from.agent() == joining_ && (message.has_hello() || message.has_dataset_report())) {
      cause_ = now();
    }
    if (cause_ == 0.0 && (message.has_process_exited() || message.has_worker_failed())) {
      cause_ = now();
    }
    if (message.has_halted()) halted_ = now();
  }
  void on_sent(const proto::Envelope& message, double departure) {
    if (message.has_assignment()) assigned_[message.assignment().generation()] = departure;
    if (message.has_halt()) halt_ = departure;
  }
  int64_t members(uint64_t generation) const {
    return static_cast<int64_t>(cluster_.roster(generation)->members->size());
  }

  void run_while(const std::function<bool()>& going_on) {
    constexpr double kMost = 600.0;
    const double deadline = now() + kMost;
    while (going_on()) {
      if (now() > deadline || !cluster_.run_next()) {
        const proto::Status status = cluster_.session().status(now());
        throw Error(fmt::format(
            "{} simulated workers do not come on: {} in generation {} at step {}: {}", workers_,
            status.phase(), status.generation(), status.step(), status.reason()));
      }
    }
  }
  // Until all of the generation have begun their first step, and some have ended it.
  void reach(uint64_t generation) {
    run_while([&] { return ended_[generation] == 0.0; });
    generation_ = generation;
  }
  void settle() {
    const double until = now() + 3 * kStepS;
    run_while([&] { return now() < until; });
    cause_ = halt_ = halted_ = 0.0;
  }

  void steady(std::vector<BenchResult>* results) {
    settle();
    const int64_t received = received_;
    const double cpu = cluster_.coordinator_cpu_s();
    const double begin = now();
    run_while([&] { return now() < begin + kSteadySteps * kStepS; });
    const double used = cluster_.coordinator_cpu_s() - cpu;
    const auto messages = static_cast<double>(received_ - received);
    results->push_back({fmt::format("{} workers: share of a core", workers_),
                        100.0 * used / (now() - begin), "%",
                        fmt::format("steps of {} s, heartbeats each second", kStepS)});
    results->push_back({fmt::format("{} workers: messages taken", workers_), messages / used, "1/s",
                        "on one core, with the answers they cause"});
  }

  void grow(std::vector<BenchResult>* results) {
    settle();
    joining_ = cluster_.add_node(1);
    reach(generation_ + 1);
    joining_ = nullptr;
    add(results, fmt::format("grow {} to {}", workers_, workers_ + 1),
        assigned_.at(generation_) - cause_, ended_.at(generation_ - 1));
  }

  void shrink(std::vector<BenchResult>* results) {
    settle();
    cause_ = now();
    proto::Envelope envelope;
    envelope.mutable_drain_request()->set_who(std::to_string(workers_));
    cluster_.order(envelope);
    reach(generation_ + 1);
    add(results, fmt::format("shrink {} to {}", workers_ + 1, workers_),
        assigned_.at(generation_) - cause_, ended_.at(generation_ - 1));
  }

  void crash(std::vector<BenchResult>* results) {
    settle();
    const double killed = now();
    cluster_.kill(*cluster_.workers()[static_cast<size_t>(workers_ / 2)], "bench");
    reach(generation_ + 1);
    add(results, fmt::format("crash {} to {}", workers_, workers_ - 1),
        halt_ - cause_ + assigned_.at(generation_) - halted_, killed);
  }

  // `from`: when training stood still.
  void add(std::vector<BenchResult>* results, const std::string& what, double decision_s,
           double from) const {
    results->push_back({what + ": decision", decision_s * kMilliseconds, "ms",
                        "of the coordinator, from a cause to the last message that tells it"});
    results->push_back({what + ": pause", (begun_.at(generation_) - from) * kMilliseconds, "ms",
                        "until the next step has begun everywhere"});
  }

  Cluster cluster_;
  const int workers_;
  const Agent* joining_ = nullptr;
  uint64_t generation_ = 0;
  int64_t received_ = 0;
  double cause_ = 0.0;
  double halt_ = 0.0;    // the last Halt
  double halted_ = 0.0;  // when the last Halted was taken
  // By generation: when its last Assignment left, its first step began, its last step ended.
  std::map<uint64_t, double> assigned_;
  std::map<uint64_t, int64_t> first_steps_;
  std::map<uint64_t, double> begun_;
  std::map<uint64_t, double> ended_;
};

}  // namespace

std::vector<BenchResult> bench_elastic() {
  const auto level = spdlog::get_level();
  spdlog::set_level(spdlog::level::warn);
  std::vector<BenchResult> results = {
      {"simulated link, one way", kLatencyS * 1e6, "us", ""},
      {"simulated link", kBandwidth / 1e9, "GB/s",
       fmt::format("each worker hands {:.0f} MB over", kStateOfWorker / 1e6)},
      {"simulated communicator", kConnectS * kMilliseconds, "ms",
       fmt::format("and up to {:.0f} ms until a worker has aborted", kAbortS * kMilliseconds)},
  };
  for (const int workers : {8, 64, 512, 4096}) {
    try {
      for (BenchResult& result : ElasticBench(workers).run()) results.push_back(std::move(result));
    } catch (const Error& error) {
      results.push_back({fmt::format("{} workers", workers), 0.0, "failed", error.what()});
    }
  }
  spdlog::set_level(level);
  return results;
}

}  // namespace muster
