// A run's progress on stdout: a bar that redraws itself on a terminal, a line now and then
// elsewhere.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "common/deadline.h"

namespace muster {

namespace proto {
class Status;
}

// Time left at the speed seen since the first status of this process, or since steps were last done
// again; pure, time is given.
class TimeLeft {
 public:
  // Seconds, nullopt while unknown.
  std::optional<double> estimate(Deadline::Clock::time_point now, int64_t step,
                                 int64_t total_steps);

 private:
  bool started_ = false;
  Deadline::Clock::time_point start_;
  int64_t start_step_ = 0;
  int64_t last_step_ = 0;
};

class Progress {
 public:
  explicit Progress(bool on_terminal) : on_terminal_(on_terminal) {}
  // Ends the bar's line.
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void show(const proto::Status& status);
  // A line of its own, above the bar.
  void note(const std::string& line);
  void clear();

 private:
  void note_phase(const proto::Status& status);
  void note_workers(const proto::Status& status);

  const bool on_terminal_;
  TimeLeft time_left_;
  bool bar_drawn_ = false;
  Deadline next_line_ = Deadline::now();
  std::string phase_;
  std::string reason_;
  uint64_t generation_ = 0;
  int workers_ = 0;  // in generation_
  double held_out_ = -1.0;
  int64_t resume_step_ = 0;
  int64_t checkpoint_step_ = 0;
};

}  // namespace muster
