// The part of Session that begins generations: what data they have, who is in, from which state.
#include <fmt/format.h>

#include <algorithm>

#include "common/error.h"
#include "common/logging.h"
#include "coordinator/session.h"

namespace muster {

void Session::on_dataset_report(const Member& member, const proto::DatasetReport& report,
                                double now) {
  if (state_.running && !report.error().empty()) {
    return fault(fmt::format("{}: {}", describe(member), report.error()), now);
  }
  const bool known =
      std::any_of(state_.datasets.begin(), state_.datasets.end(),
                  [&](const NodeDataset& dataset) { return dataset.node_id == member.node_id; });
  if (known || state_.running) return;
  state_.datasets.push_back({member.node_id,
                             {report.fingerprint(), report.train_samples(),
                              report.held_out_samples(), report.vocab_size()},
                             report.endpoint(),
                             report.error()});
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

void Session::try_start(double now) {
  promote(&state_);
  const Decision decision = decide_start(now, state_, options_);
  switch (decision.verdict) {
    case Verdict::kWait:
      if (decision.reason != waiting_for_) spdlog::info("waiting: {}", decision.reason);
      waiting_for_ = decision.reason;
      break;
    case Verdict::kFault:
      fault(decision.reason, now);
      break;
    case Verdict::kStart:
      begin_generation(decision.reason, now);
      break;
  }
}

std::optional<Manifest> Session::choose_state(double now) {
  if (config_.run.resume == "never") return Manifest{};
  CheckpointChoice choice;
  try {
    choice = choose_checkpoint(run_, unusable_);
    if (choice.found) {
      check_same_model(choice.manifest, run_.checkpoint(choice.manifest.step), config_);
    }
  } catch (const Error& e) {
    give_up(e.what(), now);
    return std::nullopt;
  }
  for (const std::string& reason : choice.rejected) event("checkpoint_rejected", reason);
  if (choice.found) return choice.manifest;
  // To begin anew beside damaged checkpoints would throw away what a person may still save.
  if (!choice.rejected.empty() || !unusable_.empty()) {
    give_up(fmt::format("no checkpoint in {} can be used{}{}: move them away to start anew",
                        run_.checkpoints(), choice.rejected.empty() ? "" : ": ",
                        choice.rejected.empty() ? "" : choice.rejected.front()),
            now);
    return std::nullopt;
  }
  return Manifest{};
}

void Session::warn_of_changes(const Manifest& manifest) {
  const DatasetFacts& dataset = state_.datasets.front().facts;
  if (manifest.dataset.fingerprint != dataset.fingerprint) {
    event(
        "warning",
        "the dataset has changed since the checkpoint: the order of samples starts anew, and some "
        "of this epoch will be seen twice or not at all");
  } else if (manifest.seed != config_.run.seed ||
             manifest.global_batch != config_.train.global_batch) {
    event("warning",
          "run.seed or train.global_batch has changed since the checkpoint: some samples of this "
          "epoch will be seen twice or not at all");
  }
}

void Session::begin_generation(const std::string& reason, double now) {
  const std::optional<Manifest> manifest = choose_state(now);
  if (!manifest) return;
  resume_step_ = manifest->step;
  if (resume_step_ > 0) warn_of_changes(*manifest);
  if (resume_step_ >= config_.train.steps) {
    return end({true, nothing_left(resume_step_, config_)}, now);
  }
  ++generation_;
  assign_ranks(&state_);
  state_.running = true;
  ready_.clear();
  store_.begin_generation(generation_);
  const int world = expected_workers(state_, options_);
  try {
    log_->begin_generation(generation_, resume_step_, reason, state_.members);
  } catch (const Error& e) {
    return give_up(e.what(), now);
  }
  training_.emplace(
      config_, config_toml_, run_, log_,
      GenerationStart{.generation = generation_,
                      .world = world,
                      .step = resume_step_,
                      .tokens = manifest->tokens,
                      .dataset = state_.datasets.front().facts},
      [this](int rank, proto::Envelope envelope) { send_to_rank(rank, std::move(envelope)); });
  // Only now: a start that comes to nothing leaves the config of the run as it was.
  try {
    write_file_atomic(run_.config(), config_toml_);
  } catch (const IoError& e) {
    return give_up(e.what(), now);
  }
  phase_ = Phase::kStarting;
  assigned_at_ = now;
  event("generation",
        fmt::format("generation {} of {} workers, from {}: {}", generation_, world,
                    resume_step_ == 0 ? "the seed" : RunDir::checkpoint_name(resume_step_), reason),
        now - started_);
  send_assignments();
}

void Session::send_assignments() {
  proto::Envelope envelope;
  proto::Assignment* assignment = envelope.mutable_assignment();
  assignment->set_generation(generation_);
  assignment->set_resume_step(resume_step_);
  if (resume_step_ > 0) assignment->set_checkpoint_path(run_.checkpoint(resume_step_));
  assignment->set_held_out_samples(state_.datasets.front().facts.held_out_samples);
  int world = 0;
  for (const Member& member : state_.members) {
    if (member.role != MemberRole::kWorker || member.state != MemberState::kActive) continue;
    ++world;
    proto::Member* entry = assignment->add_members();
    entry->set_member_id(member.id);
    entry->set_rank(member.rank);
    entry->set_host(member.host);
    entry->set_node_id(member.node_id);
  }
  assignment->set_world_size(world);
  for (int rank = 0; rank < world; ++rank) {
    assignment->set_rank(rank);
    for (const NodeDataset& dataset : state_.datasets) {
      if (dataset.node_id == worker_of_rank(rank)->node_id) {
        assignment->set_data_endpoint(dataset.endpoint);
      }
    }
    send_to_rank(rank, envelope);
  }
}

void Session::check_ready_deadline(double now) {
  if (now - assigned_at_ <= options_.join_timeout_s) return;
  std::string who;
  for (const Member& member : state_.members) {
    if (member.rank < 0 || ready_.contains(member.rank)) continue;
    who += (who.empty() ? "" : ", ") + describe(member);
  }
  fault(fmt::format("not ready within elastic.join_timeout_s = {:.1f} s: {}",
                    options_.join_timeout_s, who),
        now);
}

}  // namespace muster
