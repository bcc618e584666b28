#include "worker/train/guard.h"

#include <fmt/format.h>

#include <cmath>

#include "common/error.h"

namespace muster {

namespace {

// Weight of the newest loss in the running mean: about the last fifty steps count.
constexpr double kMeanDecay = 0.02;

}  // namespace

GuardDecision judge_loss(const TrainConfig& train, const TrainingProgress& progress, double loss) {
  if (!std::isfinite(loss)) return {false, fmt::format("the loss is {}", loss)};
  if (train.spike_factor > 0 && progress.updates > 0 &&
      loss > train.spike_factor * progress.loss_mean) {
    return {false, fmt::format("the loss {:.4f} is over {} times its running mean {:.4f}", loss,
                               train.spike_factor, progress.loss_mean)};
  }
  return {};
}

TrainingProgress advance(const TrainConfig& train, TrainingProgress progress, double loss,
                         int64_t tokens, bool applied, const std::string& reason) {
  progress.tokens += tokens;
  if (!applied) {
    ++progress.skips_in_row;
    if (progress.skips_in_row > train.max_skips) {
      throw Error(fmt::format(
          "{} updates in a row were skipped (train.max_skips = {}), the last because {}; "
          "lower optimizer.lr or look at the data of these steps",
          progress.skips_in_row, train.max_skips, reason));
    }
    return progress;
  }
  progress.skips_in_row = 0;
  progress.loss_mean =
      progress.updates == 0 ? loss : (1.0 - kMeanDecay) * progress.loss_mean + kMeanDecay * loss;
  ++progress.updates;
  return progress;
}

}  // namespace muster
