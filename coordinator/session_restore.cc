// The part of Session that outlives its process: what it leaves in the journal, and how another
// coordinator goes on from there.
#include <fmt/format.h>
#include <google/protobuf/util/json_util.h>

#include "common/error.h"
#include "coordinator/session.h"

namespace muster {

namespace {

using Known = proto::SessionState::KnownMember;

constexpr int64_t kHistory = 4096;  // steps
// Seconds between two times that it is written, for each member: joins by the thousand would
// otherwise write it, whole, as often. Whoever is not in it yet says hello again.
constexpr double kKeepS = 0.25e-3;

MemberState state_named(const std::string& name) {
  for (const auto state : {MemberState::kJoining, MemberState::kStandby, MemberState::kActive,
                           MemberState::kDraining}) {
    if (name == to_string(state)) return state;
  }
  return MemberState::kGone;
}

void write_member(const Member& member, Known* known) {
  known->set_id(member.id);
  known->set_role(to_proto(member.role));
  known->set_state(to_string(member.state));
  known->set_node_id(member.node_id);
  known->set_host(member.host);
  known->set_pid(member.pid);
  known->set_rank(member.rank);
  known->set_workers(member.workers);
  known->set_device(member.device);
  known->set_arrival(member.arrival);
  known->set_assigned(member.assigned);
}

Member read_member(const Known& known, double now) {
  Member member;
  member.id = known.id();
  member.role = role_of(known.role()).value_or(MemberRole::kWorker);
  member.state = state_named(known.state());
  member.node_id = known.node_id();
  member.host = known.host();
  member.pid = known.pid();
  member.rank = known.rank();
  member.workers = known.workers();
  member.device = known.device();
  member.arrival = known.arrival();
  member.assigned = known.assigned();
  member.last_heard = now;
  member.standby_since = now;
  return member;
}

}  // namespace

void Session::keep_for_restore() {
  dirty_ = false;
  next_keep_ = now_ + kKeepS * static_cast<double>(state_.members.size());
  proto::SessionState kept;
  for (const Member& member : state_.members) {
    if (outcome_ || member.role == MemberRole::kObserver || member.state == MemberState::kGone) {
      continue;
    }
    write_member(member, kept.add_members());
  }
  for (const NodeDataset& dataset : state_.datasets) {
    auto* entry = kept.add_datasets();
    entry->set_node_id(dataset.node_id);
    entry->set_endpoint(dataset.endpoint);
    entry->set_fingerprint(dataset.facts.fingerprint);
    entry->set_train_samples(dataset.facts.train_samples);
    entry->set_held_out_samples(dataset.facts.held_out_samples);
    entry->set_vocab_size(dataset.facts.vocab_size);
  }
  kept.set_generation(state_.running ? generation_ : 0);
  for (const std::string& id : assigned_) kept.add_assigned(id);
  if (training_) {
    kept.set_training_generation(training_->generation());
    for (const std::string& id : training_->members()) kept.add_training(id);
    kept.set_checkpoint_step(training_->checkpoint_step());
  } else {
    kept.set_checkpoint_step(checkpoint_step_);
  }
  kept.set_target_workers(state_.target_workers);
  std::string json;
  // An empty one is as good as none: nobody is to come back to a run that is over.
  if (kept.members_size() > 0) {
    (void)google::protobuf::util::MessageToJsonString(kept, &json);
  }
  log_->set_run("session", json);
}

bool Session::restore(double now) {
  proto::SessionState kept;
  const std::string json = log_->session();
  if (json.empty() || !google::protobuf::util::JsonStringToMessage(json, &kept).ok() ||
      kept.members_size() == 0) {
    return false;
  }
  restored_ = true;
  for (const Known& known : kept.members()) add_member(read_member(known, now));
  for (const auto& dataset : kept.datasets()) {
    state_.datasets.push_back({dataset.node_id(),
                               {dataset.fingerprint(), dataset.train_samples(),
                                dataset.held_out_samples(), dataset.vocab_size()},
                               dataset.endpoint(),
                               ""});
  }
  state_.target_workers = kept.target_workers();
  event("restored", fmt::format("this coordinator goes on for one that ended in generation {}",
                                kept.generation()));
  if (kept.generation() == 0) return true;
  state_.running = true;
  generation_ = kept.generation();
  assigned_ = {kept.assigned().begin(), kept.assigned().end()};
  for (size_t rank = 0; rank < assigned_.size(); ++rank) {
    places_.emplace(assigned_[rank], static_cast<int>(rank));
  }
  checkpoint_step_ = kept.checkpoint_step();
  // One may have been left behind since.
  if (const CheckpointChoice newest = choose_checkpoint(run_); newest.found) {
    checkpoint_step_ = std::max(checkpoint_step_, newest.manifest.step);
  }
  if (!state_.datasets.empty()) dataset_ = state_.datasets.front().facts;
  if (kept.training_generation() > 0) {
    log_->go_on();
    resume_step_ = log_->last_step();
    tokens_ = log_->token_history(kHistory);
    tokens_.try_emplace(resume_step_, 0);
    training_.emplace(config_, config_toml_, run_, log_,
                      GenerationStart{.generation = kept.training_generation(),
                                      .members = {kept.training().begin(), kept.training().end()},
                                      .step = resume_step_,
                                      .checkpoint_step = checkpoint_step_,
                                      .tokens = tokens_,
                                      .paused = false,
                                      .dataset = dataset_},
                      [](int, const Message&) {});
    training_->expect_reports();
    commits_seen_ = resume_step_;
  }
  phase_ = Phase::kHalting;
  halt_reason_ = "the coordinator was started anew";
  halted_at_ = now;
  await_holders();
  return true;
}

// None of the processes that the killed coordinator knew is alive.
void Session::begin_anew(double now) {
  event("restored", "nobody is left of the run before: it starts from its newest checkpoint");
  restored_ = false;
  for (Member& member : state_.members) {
    if (!is_here(member)) member.state = MemberState::kGone;
  }
  state_.datasets.clear();
  state_.running = false;
  state_.started = now;
  assigned_.clear();
  places_.clear();
  training_.reset();
  tokens_.clear();
  resume_step_ = 0;
  phase_ = Phase::kJoining;
}

}  // namespace muster
