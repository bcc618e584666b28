// What a step is for: which are evaluated, saved, last, and how many are handed out ahead. Pure.
#pragma once

#include <cstdint>

namespace muster {

struct PlanOptions {
  int64_t total_steps = 0;
  int64_t eval_every = 0;  // 0: never
  int64_t save_every = 0;  // 0: only at the end
  bool has_held_out = false;
};

struct StepFlags {
  bool evaluate = false;
  bool save = false;
  bool last = false;
};

// Steps from one mirrored state to the next, so that mirroring slows training by less than 2%.
// `mirror_s`: what a mirrored step took longer; `step_s`: a step; both seconds, 0 when unknown.
// configured: elastic.mirror_every; -1 leaves it to the measurement. 0: never.
int64_t mirror_interval(int64_t configured, double mirror_s, double step_s);

// `leave`: the run was asked to stop, and this step is its last.
StepFlags step_flags(int64_t step, const PlanOptions& options, bool leave);

// Steps planned beyond the last committed one. More hide the round trip to the coordinator and let
// data services prefetch; fewer let a run that is asked to stop leave sooner. `step_s`: duration of
// a step, 0 when unknown.
int64_t planning_window(double step_s);

}  // namespace muster
