// What the coordinator writes down: journal, events.jsonl, metrics.jsonl, samples.jsonl. Nothing
// here ends a run: what cannot be written (disk full) is left out, and the first time logged.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "common/run_dir.h"
#include "coordinator/journal.h"
#include "coordinator/json_lines.h"
#include "coordinator/membership.h"

namespace muster {

// Something that happened to the run: every membership change, checkpoint and fault.
struct Event {
  std::string kind;         // "member_joined", "checkpoint", "fault", …
  std::string reason;       // a sentence for people
  double duration_s = 0.0;  // how long it took, where that says anything
  int64_t step = 0;         // the last committed step
  uint64_t generation = 0;
};

// One committed step, over all ranks. Waits, memory and time are the maximum of the ranks.
struct StepMetrics {
  int64_t step = 0;
  int64_t tokens = 0;  // of this step's global batch
  int64_t total_tokens = 0;
  double loss = 0.0;
  double grad_norm = 0.0;
  double lr = 0.0;
  double step_s = 0.0;
  double data_wait_s = 0.0;
  double comm_wait_s = 0.0;
  int64_t mem_bytes = 0;
  double mirror_s = 0.0;
  double mfu = 0.0;  // model FLOP/s over what the devices could do at most; 0: not known
  int world = 0;
  uint64_t generation = 0;
  bool skipped = false;
  bool has_held_out = false;
  double held_out_loss = 0.0;
  double tokens_per_s() const { return step_s > 0 ? static_cast<double>(tokens) / step_s : 0.0; }
};

// A sample that was trained on: its global id and the XXH3 of its tokens.
struct TrainedSample {
  int64_t id = 0;
  uint64_t hash = 0;
  bool operator==(const TrainedSample&) const = default;
  bool operator<(const TrainedSample& other) const {
    return std::tie(id, hash) < std::tie(other.id, other.hash);
  }
};

class RunLog {
 public:
  // Throws IoError when a file cannot be opened.
  RunLog(const RunDir& run, bool debug_samples);

  uint64_t last_generation() const { return journal_.last_generation(); }
  // What a coordinator before this one left behind: see Session::restore(). "": nothing.
  std::string session() const { return journal_.run_value("session"); }
  int64_t last_step() const { return journal_.last_step(); }
  std::map<int64_t, int64_t> token_history(int64_t steps) const {
    return journal_.token_history(steps);
  }
  // Goes on where another coordinator stopped, after its last step.
  void go_on();
  void set_run(const std::string& key, const std::string& value) noexcept;
  // Forgets the metrics and samples of steps after `resume_step`: each committed step stands there
  // once.
  void begin_generation(uint64_t generation, int64_t resume_step, const std::string& reason,
                        const std::vector<Member>& members);
  void event(const Event& event) noexcept;
  // `samples`: of all ranks, in any order; written sorted, with metrics.debug_samples only.
  void step(const StepMetrics& metrics, std::vector<TrainedSample> samples) noexcept;
  void checkpoint(int64_t step, uint64_t generation) noexcept;

 private:
  void open_steps(int64_t resume_step);
  // Calls `write`; a failure is logged the first time.
  template <typename Write>
  void guard(Write write) noexcept;

  RunDir run_;
  bool debug_samples_;
  Journal journal_;
  JsonLines events_;
  std::optional<JsonLines> metrics_;  // open from the first generation on
  std::optional<JsonLines> samples_;
  int64_t newest_step_ = 0;  // in them
  bool failed_ = false;
};

}  // namespace muster
