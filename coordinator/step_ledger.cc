#include "coordinator/step_ledger.h"

#include <algorithm>
#include <limits>

namespace muster {

StepLedger::StepLedger(uint64_t generation, int world, int64_t committed)
    : generation_(generation), world_(world), committed_(committed) {}

void StepLedger::expect(int64_t step, bool evaluate) {
  pending_[step].evaluate = evaluate;
}

void StepLedger::add(const proto::StepReport& report) {
  const auto found = pending_.find(report.step());
  if (report.generation() != generation_ || report.rank() < 0 || report.rank() >= world_ ||
      found == pending_.end()) {
    return;
  }
  found->second.reports.emplace(report.rank(), report);
}

void StepLedger::add(const proto::EvalReport& report) {
  const auto found = pending_.find(report.step());
  if (report.generation() != generation_ || found == pending_.end()) return;
  found->second.held_out_loss = report.loss();
}

std::optional<CompleteStep> StepLedger::take() {
  const auto found = pending_.find(committed_ + 1);
  if (found == pending_.end()) return std::nullopt;
  const Pending& pending = found->second;
  if (static_cast<int>(pending.reports.size()) < world_ ||
      (pending.evaluate && !pending.held_out_loss)) {
    return std::nullopt;
  }
  return take_reported(found);
}

std::optional<CompleteStep> StepLedger::take_incomplete() {
  const auto found = pending_.find(committed_ + 1);
  if (found == pending_.end() || found->second.reports.empty()) return std::nullopt;
  return take_reported(found);
}

CompleteStep StepLedger::take_reported(std::map<int64_t, Pending>::iterator found) {
  const Pending& pending = found->second;
  CompleteStep complete;
  StepMetrics& metrics = complete.metrics;
  // Sums over the global batch are the same on every rank; rank 0 speaks for all.
  const proto::StepReport& first = pending.reports.begin()->second;
  metrics.step = first.step();
  metrics.tokens = first.tokens();
  metrics.loss = first.loss();
  metrics.grad_norm = first.grad_norm();
  metrics.lr = first.lr();
  metrics.skipped = first.skipped();
  metrics.world = world_;
  metrics.generation = generation_;
  metrics.has_held_out = pending.held_out_loss.has_value();
  metrics.held_out_loss = pending.held_out_loss.value_or(0.0);
  complete.skip_reason = first.skip_reason();
  complete.mirrors_ready = static_cast<int>(pending.reports.size()) == world_;
  bool mirrored = complete.mirrors_ready;
  int64_t oldest = std::numeric_limits<int64_t>::max();
  double peak_flops = 0.0;
  for (const auto& [rank, report] : pending.reports) {
    complete.mirrors_ready = complete.mirrors_ready && report.mirror_ready();
    mirrored = mirrored && report.has_mirrored();
    oldest = std::min(oldest, report.mirrored());
    complete.mirror_sent_s = std::max(complete.mirror_sent_s, report.mirror_sent_s());
    peak_flops += report.peak_flops();
    metrics.step_s = std::max(metrics.step_s, report.step_s());
    metrics.data_wait_s = std::max(metrics.data_wait_s, report.data_wait_s());
    metrics.comm_wait_s = std::max(metrics.comm_wait_s, report.comm_wait_s());
    metrics.mirror_s = std::max(metrics.mirror_s, report.mirror_s());
    metrics.mem_bytes = std::max(metrics.mem_bytes, report.mem_bytes());
    const int samples = std::min(report.samples_size(), report.sample_hashes_size());
    for (int i = 0; i < samples; ++i) {
      complete.samples.push_back({report.samples(i), report.sample_hashes(i)});
    }
  }
  if (mirrored) complete.mirrored = oldest;
  if (peak_flops > 0 && metrics.step_s > 0) {
    metrics.mfu = first.model_flop() / metrics.step_s / peak_flops;
  }
  pending_.erase(found);
  ++committed_;
  return complete;
}

std::vector<int> StepLedger::missing() const {
  std::vector<int> ranks;
  const auto found = pending_.find(committed_ + 1);
  for (int rank = 0; found != pending_.end() && rank < world_; ++rank) {
    if (!found->second.reports.contains(rank)) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace muster
