// Gathers what the ranks report about the steps, until a step is complete. Pure.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "common/protocol/muster.pb.h"
#include "coordinator/run_log.h"

namespace muster {

struct CompleteStep {
  StepMetrics metrics;  // total_tokens is left to the caller
  std::vector<TrainedSample> samples;
  std::string skip_reason;
  bool mirrors_ready = false;            // every rank has the memory of mirrors
  std::optional<int64_t> mirrored = {};  // the newest step whose state every rank has mirrored
  double mirror_sent_s = 0.0;            // the longest
};

class StepLedger {
 public:
  // Steps after `committed` follow, each reported by `world` ranks.
  StepLedger(uint64_t generation, int world, int64_t committed);

  // The step was handed out; with `evaluate` it is complete only once its held-out loss is here.
  void expect(int64_t step, bool evaluate);
  // Reports of another generation, an unknown rank or a step that was not handed out are ignored.
  void add(const proto::StepReport& report);
  void add(const proto::EvalReport& report);
  // The next step in order, once it is complete; each comes out once.
  std::optional<CompleteStep> take();
  // The next step in order, if any rank has reported it: what all of them have computed is the
  // same.
  std::optional<CompleteStep> take_incomplete();
  // Ranks that have yet to report the next step.
  std::vector<int> missing() const;

 private:
  struct Pending {
    bool evaluate = false;
    std::map<int, proto::StepReport> reports;  // by rank
    std::optional<double> held_out_loss;
  };

  CompleteStep take_reported(std::map<int64_t, Pending>::iterator found);

  uint64_t generation_;
  int world_;
  int64_t committed_;
  std::map<int64_t, Pending> pending_;
};

}  // namespace muster
