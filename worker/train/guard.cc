#include "worker/train/guard.h"

#include <fmt/format.h>

#include "common/error.h"

namespace muster {

std::string skip_reason(const TrainConfig& train, const StepControl& control) {
  switch (control.reason) {
    case SkipReason::kNone:
      return "";
    case SkipReason::kLossNotFinite:
      return fmt::format("the loss is {}", control.loss);
    case SkipReason::kLossSpike:
      return fmt::format("the loss {:.4f} is over {} times its running mean {:.4f}", control.loss,
                         train.spike_factor, control.loss_mean_before);
    case SkipReason::kGradNormNotFinite:
      return "the gradient norm is not finite";
  }
  MUSTER_CHECK(false, "bad reason");
}

void check_skips(const TrainConfig& train, const StepControl& control) {
  if (control.skips_in_row <= train.max_skips) return;
  throw Error(fmt::format(
      "{} updates in a row were skipped (train.max_skips = {}), the last because {}; lower "
      "optimizer.lr or look at the data of these steps",
      control.skips_in_row, train.max_skips, skip_reason(train, control)));
}

}  // namespace muster
