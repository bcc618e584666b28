// Where the wall time of a run went: training, or pauses between generations. Pure.
#pragma once

#include <algorithm>
#include <cstdint>

namespace muster {

class PauseClock {
 public:
  // A generation begins to train; the first also starts the clock. Returns the seconds since the
  // last commit, 0 at first.
  double begin(double now) {
    if (started_ < 0) {
      started_ = last_ = now;
      return 0.0;
    }
    pause_ = now - last_;
    paused_ += pause_;
    last_ = now;
    return pause_;
  }
  // A step was committed that took `step_s`.
  void commit(double now, double step_s) {
    last_ = now;
    trained_ += step_s;
  }
  // Steps that were committed are done again; they took `step_s` in all.
  void redo(int64_t steps, double step_s) {
    redone_ += steps;
    trained_ -= step_s;
  }

  double last() const { return last_; }  // when a step was committed, or a generation began
  double pause() const { return pause_; }
  double paused() const { return paused_; }
  int64_t redone() const { return redone_; }
  // Share of the time since the first step that went into steps that count; 0 before. At most 1:
  // workers measure their steps, and that overlaps.
  double goodput(double now) const {
    return started_ < 0 || now <= started_ ? 0.0
                                           : std::clamp(trained_ / (now - started_), 0.0, 1.0);
  }

 private:
  double started_ = -1.0;
  double last_ = 0.0;
  double pause_ = 0.0;
  double paused_ = 0.0;
  double trained_ = 0.0;
  int64_t redone_ = 0;
};

}  // namespace muster
