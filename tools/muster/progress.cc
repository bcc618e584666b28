#include "tools/muster/progress.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "common/protocol/muster.pb.h"
#include "tools/muster/format.h"

namespace muster {
namespace {

// Between two lines where no terminal redraws them.
constexpr std::chrono::seconds kLineInterval(10);
constexpr int kBarWidth = 24;

}  // namespace

std::optional<double> TimeLeft::estimate(Deadline::Clock::time_point now, int64_t step,
                                         int64_t total_steps) {
  if (step == 0) return std::nullopt;
  const bool back = step < last_step_;
  last_step_ = step;
  if (!started_ || back) {
    started_ = true;
    start_ = now;
    start_step_ = step;
  }
  if (step == start_step_) return std::nullopt;
  const std::chrono::duration<double> passed = now - start_;
  return passed.count() / static_cast<double>(step - start_step_) *
         static_cast<double>(total_steps - step);
}

void Progress::show(const proto::Status& status) {
  note_phase(status);
  note_workers(status);
  if (status.resume_step() != resume_step_) {
    resume_step_ = status.resume_step();
    checkpoint_step_ = std::max(checkpoint_step_, resume_step_);
    if (resume_step_ > 0) note(fmt::format("resumed from the checkpoint of step {}", resume_step_));
  }
  if (status.has_held_out() && status.held_out_loss() != held_out_) {
    held_out_ = status.held_out_loss();
    note(progress_line(status));
    next_line_ = Deadline::after(kLineInterval);
  }
  if (status.checkpoint_step() > checkpoint_step_) {
    checkpoint_step_ = status.checkpoint_step();
    note(fmt::format("step {} is saved", checkpoint_step_));
  }
  const auto left =
      time_left_.estimate(Deadline::Clock::now(), status.step(), status.total_steps());
  if (status.step() == 0) return;
  std::string line = progress_line(status);
  if (left) line += fmt::format(", {} left", format_duration(*left));
  if (on_terminal_) {
    const double share =
        static_cast<double>(status.step()) / static_cast<double>(status.total_steps());
    // Erases what a longer line before left over.
    fmt::print("\r{} {}\x1b[K", progress_bar(share, kBarWidth), line);
    bar_drawn_ = true;
  } else if (next_line_.passed()) {
    fmt::print("{}\n", line);
    next_line_ = Deadline::after(kLineInterval);
  }
  std::fflush(stdout);
}

void Progress::note_phase(const proto::Status& status) {
  // The end is not announced here: whoever shows the progress reports it.
  if (status.finished() || (status.phase() == phase_ && status.reason() == reason_)) return;
  phase_ = status.phase();
  reason_ = status.reason();
  // How a run that has trained goes from generation to generation is told by its events.
  const bool change = phase_ == "starting" || phase_ == "recovering" || phase_ == "training";
  if (generation_ > 0 && change && reason_.empty()) return;
  note(phase_ + (reason_.empty() ? "" : ": " + reason_));
}

// The size of a run changes with its generation; what members do in between is on its way there.
void Progress::note_workers(const proto::Status& status) {
  if (status.phase() != "training" || status.generation() == generation_) return;
  const int workers = training_workers(status);
  if (workers_ > 0 && workers != workers_) {
    note(fmt::format("{} worker{} from here on, {} before", workers, workers == 1 ? "" : "s",
                     workers_));
  }
  generation_ = status.generation();
  workers_ = workers;
}

void Progress::note(const std::string& line) {
  if (bar_drawn_) fmt::print("\r\x1b[K");
  bar_drawn_ = false;
  fmt::print("{}\n", line);
  std::fflush(stdout);
}

void Progress::clear() {
  if (bar_drawn_) fmt::print("\n");
  bar_drawn_ = false;
  std::fflush(stdout);
}

}  // namespace muster
