#include "worker/train/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace muster {

double learning_rate(const ScheduleConfig& schedule, double peak, int64_t step,
                     int64_t total_steps) {
  const int64_t warmup = std::min(schedule.warmup_steps, total_steps);
  if (step <= warmup) return peak * static_cast<double>(step) / static_cast<double>(warmup);
  if (schedule.type == "constant") return peak;

  int64_t decay = total_steps - warmup;
  if (schedule.type == "wsd") {
    const int64_t asked = schedule.decay_steps > 0 ? schedule.decay_steps : total_steps / 10;
    decay = std::clamp<int64_t>(asked, 1, decay);
  }
  const int64_t into_decay = step - (total_steps - decay);
  if (into_decay <= 0) return peak;
  const double progress =
      std::min(1.0, static_cast<double>(into_decay) / static_cast<double>(decay));
  const double floor = peak * schedule.min_lr_ratio;
  if (schedule.type == "cosine") {
    return floor + (peak - floor) * 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  }
  return peak + (floor - peak) * progress;
}

}  // namespace muster
