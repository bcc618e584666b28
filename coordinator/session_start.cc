// The part of Session that begins generations: who is in, and from which state.
#include <fmt/format.h>

#include <algorithm>

#include "common/error.h"
#include "common/logging.h"
#include "coordinator/listing.h"
#include "coordinator/session.h"

namespace muster {

namespace {

// Members in this order, and their nodes, each once.
void list_members(const std::vector<const Member*>& members,
                  const std::vector<NodeDataset>& datasets, proto::Assignment* assignment) {
  std::unordered_map<std::string, int> nodes;  // place by id
  for (const Member* member : members) {
    const auto [node, added] = nodes.emplace(member->node_id, assignment->nodes_size());
    if (added) assignment->add_nodes()->set_node_id(member->node_id);
    proto::Assignment::Member* entry = assignment->add_members();
    entry->set_member_id(member->id);
    entry->set_node(node->second);
  }
  for (const NodeDataset& dataset : datasets) {
    const auto node = nodes.find(dataset.node_id);
    if (node != nodes.end()) {
      assignment->mutable_nodes(node->second)->set_data_endpoint(dataset.endpoint);
    }
  }
}

}  // namespace

bool Session::assigned_member(const std::string& id) const {
  const auto found = places_.find(id);
  return found != places_.end() && static_cast<size_t>(found->second) < assigned_.size();
}

void Session::try_start(double now) {
  promote(now, &state_);
  if (state_.running) return start_again(now);
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
  if (config_.run.resume == "never" && !state_.running) return Manifest{};
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

// All workers of a run were lost, or too few were left for any world.
void Session::start_again(double now) {
  const int world = allowed_world(available_workers(state_), state_, options_);
  if (world > 0 && world >= options_.min_workers) {
    return go_on("workers are there again", now);
  }
  const std::string waiting = fmt::format("{} of at least {} workers are there",
                                          available_workers(state_), options_.min_workers);
  if (waiting != waiting_for_) spdlog::info("waiting: {}", waiting);
  waiting_for_ = waiting;
  if (now - too_few_since_ > options_.wait_timeout_s) {
    fault(
        fmt::format("{} after elastic.wait_timeout_s = {:.1f} s", waiting, options_.wait_timeout_s),
        now);
  }
}

void Session::begin_generation(const std::string& reason, double now) {
  const std::optional<Manifest> manifest = choose_state(now);
  if (!manifest) return;
  resume_step_ = manifest->step;
  checkpoint_step_ = manifest->step;
  tokens_ = {{resume_step_, manifest->tokens}};
  if (!state_.running) {
    dataset_ = state_.datasets.front().facts;
    if (resume_step_ > 0) warn_of_changes(*manifest);
  }
  if (resume_step_ >= config_.train.steps) {
    return end({true, nothing_left(resume_step_, config_)}, now);
  }
  // Only now: a start that comes to nothing leaves the config of the run as it was.
  try {
    write_file_atomic(run_.config(), config_toml_);
  } catch (const IoError& e) {
    return give_up(e.what(), now);
  }
  assign(
      std::nullopt,
      fmt::format("from {}: {}",
                  resume_step_ == 0 ? "the seed" : RunDir::checkpoint_name(resume_step_), reason),
      now);
}

void Session::assign(const std::optional<Recovery>& handover, const std::string& reason,
                     double now) {
  const std::vector<std::string> chosen = choose_workers(state_, options_);
  if (chosen.empty()) return wait_for_workers(reason, now);
  ++generation_;
  store_.begin_generation(generation_);
  std::vector<std::string> members = rank_order(chosen, state_);
  Places places;
  proto::Envelope envelope;
  *envelope.mutable_assignment() = make_assignment(members, handover, &places);
  proto::Assignment* assignment = envelope.mutable_assignment();
  assignment->set_resume_step(resume_step_);
  if (!handover && resume_step_ > 0) {
    assignment->set_checkpoint_path(run_.checkpoint(resume_step_));
  }
  loaded_step_ = handover ? 0 : resume_step_;
  take_up(std::move(members), std::move(places), reason, now);
  send_to_all(places_, envelope);
}

// The newest generation is the one that follows.
void Session::take_up(std::vector<std::string> members, Places places, const std::string& reason,
                      double now) {
  assigned_ = std::move(members);
  places_ = std::move(places);
  give_ranks(now, assigned_, &state_);
  assigned_paused_ = static_cast<int>(assigned_.size()) < options_.min_workers;
  assigned_reason_ = reason;
  assigned_at_ = now;
  state_.running = true;
  ready_.clear();
  phase_ = Phase::kStarting;
  event("generation",
        fmt::format("generation {} of {} workers, {}", generation_, assigned_.size(), reason),
        now - started_);
  keep_for_restore();  // before anybody acts on it
}

proto::Assignment Session::make_assignment(const std::vector<std::string>& members,
                                           const std::optional<Recovery>& handover,
                                           Places* places) {
  std::vector<const Member*> receivers;
  const auto place = [&](const std::string& id) {
    const auto [found, added] = places->emplace(id, static_cast<int>(receivers.size()));
    if (added) receivers.push_back(find_member(id));
    return found->second;
  };
  for (const std::string& id : members) place(id);
  proto::Assignment assignment;
  assignment.set_generation(generation_);
  assignment.set_world_size(static_cast<int>(members.size()));
  assignment.set_held_out_samples(dataset_.held_out_samples);
  if (handover) {
    proto::Handover* pieces = assignment.mutable_handover();
    pieces->set_generation(handover->generation);
    for (const std::string& holder : handover->holders) pieces->add_holders(place(holder));
  }
  list_members(receivers, state_.datasets, &assignment);
  return assignment;
}

void Session::send_to_all(const Places& places, const Message& message) {
  for (const auto& [id, place] : places) send_or_suspect(id, message);
}

void Session::on_ready(const Member& member, const proto::Ready& ready, double now) {
  if (phase_ != Phase::kStarting || ready.generation() != generation_) return;
  if (!assigned_member(member.id)) return;
  ready_[member.id] = ready;
  start_training(now);
}

// Once everybody is ready, and the generation before has trained its last step.
void Session::start_training(double now) {
  if (phase_ != Phase::kStarting || ready_.size() < assigned_.size()) return;
  if (changing_ && !training_->finished()) return;
  for (const auto& [id, ready] : ready_) {
    if (ready.checkpoint_error().empty()) continue;
    event("checkpoint_rejected",
          fmt::format("{}: {}", describe(*find_member(id)), ready.checkpoint_error()));
    unusable_.insert(resume_step_);
    return begin_generation(fmt::format("the checkpoint of step {} is unusable", resume_step_),
                            now);
  }
  const bool planned = changing_;
  const int before = training_ ? training_->world() : 0;
  if (changing_) {
    tokens_ = training_->token_history();
    changing_ = false;
  }
  const bool mirrors_ready = std::all_of(
      ready_.begin(), ready_.end(), [](const auto& ready) { return ready.second.mirror_ready(); });
  parts_.assign(assigned_.size(), "");
  for (const auto& [id, ready] : ready_) {
    const auto part = static_cast<size_t>(ready.part());
    if (part < parts_.size() && parts_[part].empty()) {
      parts_[part] = id;
      continue;
    }
    return give_up(fmt::format("{} says that it holds part {} of the state, which is out of range "
                               "or another worker's",
                               describe(*find_member(id)), ready.part()),
                   now);
  }
  try {
    log_->begin_generation(generation_, resume_step_, assigned_reason_, state_.members);
  } catch (const Error& e) {
    return give_up(e.what(), now);
  }
  if (training_) checkpoint_step_ = std::max(checkpoint_step_, training_->checkpoint_step());
  training_.emplace(config_, config_toml_, run_, log_,
                    GenerationStart{.generation = generation_,
                                    .members = assigned_,
                                    .step = resume_step_,
                                    .checkpoint_step = checkpoint_step_,
                                    .tokens = tokens_,
                                    .paused = assigned_paused_,
                                    .mirrors_ready = mirrors_ready,
                                    .dataset = dataset_},
                    [this, members = assigned_](int rank, const Message& message) {
                      send_or_suspect(members[static_cast<size_t>(rank)], message);
                    });
  commits_seen_ = resume_step_;
  trained_seen_ = 0.0;
  stragglers_.begin(training_->world());
  const double pause = pauses_.begin(now);
  event("generation_started",
        fmt::format("generation {} trains from step {}", generation_, resume_step_),
        now - assigned_at_);
  if (planned) {
    event("resized",
          fmt::format("from {} to {} workers after step {}", before, training_->world(),
                      resume_step_),
          pause);
  } else if (before > 0) {
    event("recovered",
          fmt::format("{} workers go on from step {}", training_->world(), resume_step_), pause);
  }
  phase_ = Phase::kTraining;
  if (assigned_paused_) {
    too_few_since_ = now;
    waiting_for_ = fmt::format("{} workers are too few to train: elastic.min_workers = {}",
                               assigned_.size(), options_.min_workers);
    event("waiting", waiting_for_);
  }
  keep_for_restore();
  training_->begin(now);
  if (stop_reason_) {
    phase_ = Phase::kStopping;
    training_->leave(*stop_reason_);
  }
  note_outcome(now);
}

void Session::check_ready_deadline(double now) {
  const double since = changing_ ? std::max(assigned_at_, pauses_.last()) : assigned_at_;
  if (now - since <= options_.join_timeout_s) return;
  Listing who;
  std::vector<std::string> late;
  for (const std::string& id : assigned_) {
    if (ready_.contains(id)) continue;
    who.add([&] { return describe(*find_member(id)); });
    late.push_back(id);
  }
  const std::string reason = fmt::format("not ready within elastic.join_timeout_s = {:.1f} s: {}",
                                         options_.join_timeout_s, who.text());
  if (!training_ || late.empty()) return fault(reason, now);
  for (const std::string& id : late) {
    if (!outcome_) lose(find_member(id), reason, now);
  }
}

}  // namespace muster
