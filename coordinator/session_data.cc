// The part of Session that hears of the nodes' data.
#include <fmt/format.h>

#include <algorithm>

#include "coordinator/session.h"

namespace muster {

void Session::on_dataset_report(const Member& member, const proto::DatasetReport& report,
                                double now) {
  if (state_.running && !report.error().empty()) {
    if (!dataset_of(state_, member.node_id)) return turn_away(member.node_id, report.error(), now);
    return fault(fmt::format("{}: {}", describe(member), report.error()), now);
  }
  if (dataset_of(state_, member.node_id) != nullptr) return;
  if (state_.running && report.fingerprint() != dataset_.fingerprint) {
    return turn_away(member.node_id,
                     fmt::format("it sees another dataset (fingerprint {}) than the run ({}): "
                                 "data.sources must hold the same files on every node",
                                 report.fingerprint(), dataset_.fingerprint),
                     now);
  }
  state_.datasets.push_back({member.node_id,
                             {report.fingerprint(), report.train_samples(),
                              report.held_out_samples(), report.vocab_size()},
                             report.endpoint(),
                             report.error()});
  look_soon();
  if (state_.running) return tell_of_data(member.node_id, report.endpoint());
  skipped_files_ = std::max(skipped_files_, report.skipped_count());
  partly_used_files_ = std::max(partly_used_files_, report.partly_used_count());
  if (report.error().empty()) {
    event("dataset",
          fmt::format("{} documents, {} tokens: {} training and {} held-out samples",
                      report.documents(), report.tokens(), report.train_samples(),
                      report.held_out_samples()),
          now - started_);
  }
  const auto tell = [&](const char* kind, const auto& files, int64_t count) {
    for (const std::string& file : files) event(kind, file);
    if (count > files.size()) event(kind, fmt::format("{} files in all", count));
  };
  tell("file_skipped", report.skipped(), report.skipped_count());
  tell("file_partly_used", report.partly_used(), report.partly_used_count());
  // Every node sees the same corpus: what is wrong with it is said once.
  if (state_.datasets.size() == 1 && report.error().empty()) warn_of_no_evaluation(report);
}

void Session::warn_of_no_evaluation(const proto::DatasetReport& report) {
  if (config_.train.eval_every == 0 || report.held_out_samples() > 0) return;
  event(
      "warning",
      fmt::format("train.eval_every is {}, but nothing is evaluated, as data.held_out = {} leaves "
                  "none of the {} documents for it: raise that, or add documents; or set "
                  "train.eval_every = 0",
                  config_.train.eval_every, config_.data.held_out, report.documents()));
}

// A node whose data is not the run's cannot take part; the run goes on without it.
void Session::turn_away(const std::string& node_id, const std::string& reason, double now) {
  for (Member& member : state_.members) {
    if (member.node_id != node_id || member.state == MemberState::kGone) continue;
    event("member_refused", fmt::format("{}: {}", describe(member), reason));
    // In a generation with data that has changed since: nothing that it trains could be kept.
    if (member.role == MemberRole::kWorker && assigned_member(member.id)) {
      return fault(fmt::format("{}: {}", describe(member), reason), now);
    }
    dismiss(&member, reason, /*ok=*/false, now);
  }
}

// The service was started anew: its workers ask it for what the old one owed them.
void Session::tell_of_data(const std::string& node_id, const std::string& endpoint) {
  proto::Envelope envelope;
  envelope.mutable_data_moved()->set_endpoint(endpoint);
  const Message moved = envelope;
  for (const Member& member : state_.members) {
    if (member.role == MemberRole::kWorker && member.node_id == node_id && member.assigned) {
      send_or_suspect(member.id, moved);
    }
  }
}

}  // namespace muster
