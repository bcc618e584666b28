#include "coordinator/simulation/chaos.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "coordinator/json_lines.h"
#include "coordinator/simulation/cluster.h"
#include "coordinator/simulation/history.h"

namespace muster::simulation {

namespace {

// Without faults a committed step, or whatever else is due, comes within this.
constexpr double kPatienceS = 40.0;
// Longer than any run of these sizes can take.
constexpr double kMostSimulatedS = 2000.0;
constexpr int kMostNodes = 6;
// Workers that end with no step in between: some more, and the run is right to give up.
constexpr int64_t kMostEnded = 10;

// A cluster as it begins.
struct Shape {
  ClusterOptions options;
  int nodes = 1;
  int workers = 1;  // on each
};

Shape random_shape(uint64_t seed, size_t kept_traces) {
  Dice dice(seed * 2 + 1);
  Shape shape;
  ClusterOptions& options = shape.options;
  options.seed = seed;
  options.kept_traces = kept_traces;
  Config& config = options.config;
  config.run.name = "chaos";
  config.run.device = "cpu";
  config.run.seed = seed;
  config.train.steps = dice.integer(30, 70);
  config.train.global_batch = dice.integer(6, 12);
  config.train.eval_every = dice.chance(0.2) ? 5 : 0;
  config.checkpoint.every = dice.chance(0.4) ? dice.integer(3, 15) : 0;
  config.metrics.debug_samples = true;
  config.elastic.heartbeat_s = 1.0;
  config.elastic.collective_timeout_s = 8.0;
  config.elastic.join_timeout_s = 12.0;
  config.elastic.shutdown_timeout_s = 4.0;
  config.elastic.wait_timeout_s = 600.0;
  config.elastic.cool_down_s = 10.0;
  config.elastic.restart_window_s = 30.0;
  config.elastic.restarts = dice.integer(0, 4);
  config.elastic.join_window_s = dice.uniform(0.0, 1.0);
  config.elastic.min_workers = dice.integer(1, 3);
  config.elastic.max_workers = dice.chance(0.5) ? dice.integer(3, 6) : 0;
  config.elastic.mirror_every = dice.pick(std::vector<int64_t>{1, 1, 1, -1, 3, 0});
  if (dice.chance(0.15)) config.parallel.shard_group = 2;
  if (config.parallel.shard_group == 2) config.elastic.min_workers = 2;
  options.train_samples = dice.integer(50, 500);
  options.held_out_samples = config.train.eval_every > 0 ? 10 : 0;
  options.network.latency_s = dice.uniform(0.0001, 0.01);
  options.network.slow_share = dice.chance(0.5) ? 0.05 : 0.0;
  options.network.slow_s = dice.uniform(0.1, 2.0);
  options.network.duplicate_share = dice.chance(0.5) ? 0.1 : 0.0;
  options.times.step_s = dice.uniform(0.05, 0.4);
  // What the first nodes bring must be a world.
  shape.nodes = static_cast<int>(dice.integer(1, 3));
  shape.workers = config.parallel.shard_group == 2 ? 2 : static_cast<int>(dice.integer(1, 3));
  options.expected_workers = shape.nodes * shape.workers;
  config.train.global_batch =
      std::max<int64_t>(config.train.global_batch, options.expected_workers);
  if (dice.chance(0.3)) options.times.mirror_memory_s = dice.uniform(0.1, 10.0);
  options.times.prepare_s = dice.uniform(0.0, 3.0);
  if (dice.chance(0.3)) options.times.failing_share = dice.uniform(0.0, 0.5);
  if (dice.chance(0.3)) options.times.crowded_share = dice.uniform(0.0, 1.0);
  const bool may_take_long = config.elastic.mirror_every != 1;
  if (may_take_long && dice.chance(0.5)) options.times.mirror_s = dice.uniform(0.1, 3.0);
  return shape;
}

class Chaos {
 public:
  Chaos(uint64_t seed, size_t kept_traces)
      : shape_(random_shape(seed, kept_traces)),
        options_(shape_.options),
        cluster_(options_),
        dice_(seed * 2) {
    mean_s_ = dice_.uniform(0.3, 4.0);
    chaos_s_ = dice_.uniform(5.0, 40.0);
    if (dice_.chance(0.5)) cluster_.kill_at_message = dice_.integer(30, 600);
  }

  ChaosOutcome run() {
    ChaosOutcome outcome;
    try {
      play();
      check_log();
    } catch (const Violation& violation) {
      outcome.violation = violation.what();
      for (const Trace& trace : cluster_.traces()) outcome.violation += "\n  " + trace.to_string();
    }
    const proto::Status status = cluster_.session().status(cluster_.now());
    outcome.steps = status.step();
    outcome.generations = status.generation();
    outcome.faults = faults_;
    outcome.simulated_s = cluster_.now();
    return outcome;
  }

 private:
  void play() {
    for (int i = 0; i < shape_.nodes; ++i) cluster_.add_node(shape_.workers);
    while (cluster_.session().phase() != Phase::kTraining && step()) {
    }
    const double begin = cluster_.now();
    double next = begin + dice_.interval(mean_s_);
    while (!cluster_.session().over()) {
      const bool quiet = cluster_.now() > begin + chaos_s_;
      if (quiet) cluster_.kill_at_message = 0;
      if (!quiet && cluster_.now() >= next) {
        disturb();
        next = cluster_.now() + dice_.interval(mean_s_);
      }
      if (!step()) break;
      watch();
    }
    end();
  }

  bool step() {
    cluster_.require(cluster_.now() < kMostSimulatedS, "the run does not end");
    return cluster_.run_next();
  }

  template <typename T>
  T* any(const std::vector<T*>& from) {
    return from.empty() ? nullptr : dice_.pick(from);
  }

  void disturb() {
    if (cluster_.session().outcome() || ended_workers() - ended_ > kMostEnded) return;
    last_fault_ = cluster_.now();
    ++faults_;
    Worker* worker = any(cluster_.workers());
    Agent* node = any(cluster_.nodes());
    const double what = dice_.uniform(0.0, 100.0);
    if (what < 30 && worker != nullptr) {
      cluster_.kill(*worker, "chaos");
      // Two at once, now and then.
      if (dice_.chance(0.2) && (worker = any(cluster_.workers())) != nullptr) {
        cluster_.kill(*worker, "chaos, the second");
      }
    } else if (what < 38 && node != nullptr && node->data() != nullptr) {
      cluster_.kill(*node->data(), "chaos");
    } else if (what < 44 && node != nullptr) {
      cluster_.kill(*node, "chaos");
    } else if (what < 48 && node != nullptr) {
      cluster_.cut_power(*node);
    } else if (what < 56 && worker != nullptr) {
      const double seconds = dice_.uniform(0.1, 12.0);
      cluster_.stop_for(*worker, seconds);
      last_fault_ += seconds;
    } else if (what < 60 && node != nullptr) {
      const double seconds = dice_.uniform(0.1, 9.0);
      cluster_.cut_for(*node, seconds);
      last_fault_ += seconds;
    } else if (what < 72 && cluster_.nodes().size() < kMostNodes) {
      cluster_.add_node(static_cast<int>(dice_.integer(1, 3)));
    } else if (what < 80 && worker != nullptr) {
      cluster_.note("gets SIGTERM", *worker);
      worker->ask_to_leave("SIGTERM");
    } else if (what < 84 && node != nullptr) {
      cluster_.note("gets SIGTERM", *node);
      node->ask_to_leave("SIGTERM");
    } else if (what < 87 && cluster_.now() > next_stop_) {
      // Not for so long, nor so soon again, that the members give it up; its first word after that
      // may be slow, besides.
      const double seconds = dice_.uniform(0.1, 3.9 - options_.network.slow_s);
      cluster_.stop_coordinator_for(seconds);
      last_fault_ += seconds;
      next_stop_ = last_fault_ + options_.config.elastic.heartbeat_s * kMissedHeartbeats;
    } else if (what < 93) {
      proto::Envelope envelope;
      envelope.mutable_drain_request()->set_who(std::to_string(dice_.integer(0, 4)));
      cluster_.order(envelope);
    } else {
      proto::Envelope envelope;
      envelope.mutable_scale_request()->set_workers(static_cast<int32_t>(dice_.integer(1, 6)));
      cluster_.order(envelope);
    }
  }

  // Workers that could train, now or once they have started.
  int i_workers() const { return static_cast<int>(cluster_.workers().size()); }

  int64_t ended_workers() const {
    return std::count_if(cluster_.processes().begin(), cluster_.processes().end(),
                         [](const auto& process) {
                           return process->role() == proto::ROLE_WORKER && !process->running();
                         });
  }

  // That what is due comes, and that somebody is there to train.
  void watch() {
    const double now = cluster_.now();
    const int64_t messages = cluster_.messages();
    if (messages == seen_messages_ && now < next_look_) return;
    seen_messages_ = messages;
    next_look_ = now + 1.0;
    const proto::Status status = cluster_.session().status(now);
    if (status.step() > best_step_) ended_ = ended_workers();
    if (status.step() > best_step_ || status.generation() != generation_) {
      best_step_ = std::max(best_step_, status.step());
      generation_ = status.generation();
      progressed_ = now;
    }
    if (cluster_.session().outcome()) return;
    const double since = std::max({progressed_, last_fault_, replenished_});
    if (now - since > 5.0) replenish(now);
    cluster_.require(now - std::max(progressed_, last_fault_) < 2 * kPatienceS,
                     fmt::format("no progress since {:.1f} s: {} at step {}, {} workers run", since,
                                 status.phase(), status.step(), i_workers()));
    if (now - last_fault_ < kPatienceS) return;
    for (const Worker* worker : cluster_.workers()) {
      cluster_.require(
          worker->state() != Worker::State::kFailed || now - worker->state_since() < kPatienceS,
          worker->id() + " waits for Halt in vain");
      cluster_.require(
          worker->state() != Worker::State::kGivenUp || now - worker->state_since() < kPatienceS,
          worker->id() + " handed its state over and waits in vain");
    }
  }

  // Somebody starts new nodes when the run waits for workers.
  void replenish(double now) {
    replenished_ = now;
    const auto have = static_cast<int64_t>(cluster_.workers().size());
    if (cluster_.nodes().size() >= 3 * kMostNodes) return;
    if (have < options_.config.elastic.min_workers + 1) {
      cluster_.add_node(2);
    } else {
      cluster_.add_node(1);
    }
  }

  void end() {
    const auto& outcome = cluster_.session().outcome();
    cluster_.require(outcome.has_value(), "nothing happens any more, and the run is not over");
    cluster_.require(outcome->ok, "the run failed: " + outcome->reason);
    for (const auto& process : cluster_.processes()) {
      if (process->running() || process->status().signalled || !process->welcomed()) continue;
      cluster_.require(process->status().ok() || process->disturbed() ||
                           (process->agent() != nullptr && !process->agent()->running()),
                       fmt::format("{} ended {}", process->id(), process->status().to_string()));
    }
  }

  // The whole run, as a reader of the run directory finds it.
  void check_log() {
    const auto metrics = read_json_lines(cluster_.run().metrics());
    const auto samples = read_json_lines(cluster_.run().samples());
    const int64_t steps = cluster_.session().status(cluster_.now()).step();
    for (int64_t step = 1; step <= steps; ++step) {
      const auto index = static_cast<size_t>(step - 1);
      cluster_.require(metrics.size() > index && metrics[index].at("step") == step,
                       fmt::format("line {} of metrics.jsonl is not of that step", step));
      const auto& line = metrics[index];
      cluster_.require(line.at("loss") == loss_of(cluster_.history(step)),
                       fmt::format("step {} has another history than undisturbed", step));
      auto expected = cluster_.samples(step);
      std::sort(expected.begin(), expected.end());
      cluster_.require(samples.size() > index && samples[index].at("step") == step &&
                           samples[index].at("samples").get<std::vector<int64_t>>() == expected,
                       fmt::format("step {} was trained on other samples than it should", step));
      cluster_.require(
          line.at("total_tokens") == step * options_.config.train.global_batch,
          fmt::format("total_tokens of step {} is {}", step, line.at("total_tokens").dump()));
    }
    cluster_.require(
        static_cast<int64_t>(metrics.size()) == steps && samples.size() == metrics.size(),
        fmt::format("{} steps are committed, {} are in metrics.jsonl, {} in "
                    "samples.jsonl",
                    steps, metrics.size(), samples.size()));
  }

  const Shape shape_;
  const ClusterOptions& options_;
  Cluster cluster_;
  Dice dice_;
  double mean_s_;
  double chaos_s_;
  double last_fault_ = 0.0;
  double next_stop_ = 0.0;  // of the coordinator
  int64_t faults_ = 0;
  int64_t seen_messages_ = 0;
  double next_look_ = 0.0;
  double progressed_ = 0.0;
  double replenished_ = 0.0;
  int64_t best_step_ = 0;
  int64_t ended_ = 0;  // workers, when that was committed
  uint64_t generation_ = 0;
};

}  // namespace

ChaosOutcome run_chaos(uint64_t seed, size_t kept_traces) {
  return Chaos(seed, kept_traces).run();
}

}  // namespace muster::simulation
