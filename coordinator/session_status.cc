// The part of Session that answers for the run's state.
#include "coordinator/session.h"

namespace muster {

namespace {

// What a person reads: "joining", …
const char* phase_name(Phase phase, const std::optional<Outcome>& outcome) {
  if (outcome) return outcome->ok ? "finished" : "failed";
  switch (phase) {
    case Phase::kJoining:
      return "joining";
    case Phase::kStarting:
      return "starting";
    case Phase::kHalting:
      return "recovering";
    case Phase::kStopping:
      return "stopping";
    default:
      return "training";
  }
}

}  // namespace

proto::Status Session::status(double now) const {
  proto::Status status;
  status.set_run_name(config_.run.name);
  status.set_run_dir(run_.root);
  status.set_phase(phase_name(phase_, outcome_));
  status.set_reason(outcome_ ? outcome_->reason
                    : phase_ == Phase::kJoining || (training_ && training_->paused()) ? waiting_for_
                                                                                      : "");
  status.set_generation(generation_);
  status.set_total_steps(config_.train.steps);
  status.set_elapsed_s(now - started_);
  status.set_skipped_files(skipped_files_);
  status.set_partly_used_files(partly_used_files_);
  status.set_finished(outcome_.has_value());
  status.set_ok(outcome_ && outcome_->ok);
  status.set_pause_s(pauses_.pause());
  status.set_paused_total_s(pauses_.paused());
  status.set_goodput(pauses_.goodput(now));
  status.set_redone_steps(pauses_.redone());
  status.set_target_workers(state_.target_workers);
  status.set_min_workers(options_.min_workers);
  status.set_resume_step(loaded_step_);
  status.set_step(committed());
  if (training_) {
    const StepMetrics& metrics = training_->metrics();
    status.set_tokens(training_->tokens());
    status.set_loss(metrics.loss);
    status.set_lr(metrics.lr);
    status.set_grad_norm(metrics.grad_norm);
    status.set_tokens_per_s(metrics.tokens_per_s());
    status.set_checkpoint_step(training_->checkpoint_step());
    if (training_->held_out_loss()) {
      status.set_has_held_out(true);
      status.set_held_out_loss(*training_->held_out_loss());
    }
  }
  for (const Member& member : state_.members) {
    if (member.role == MemberRole::kObserver) continue;
    proto::MemberStatus* entry = status.add_members();
    entry->set_member_id(member.id);
    entry->set_role(to_proto(member.role));
    entry->set_state(to_string(member.state));
    entry->set_host(member.host);
    entry->set_pid(member.pid);
    entry->set_rank(member.rank);
    entry->set_heartbeat_age_s(now - member.last_heard);
    entry->set_step_s(stragglers_.last(member.id).step_s);
    entry->set_wait_s(stragglers_.last(member.id).wait_s);
    entry->set_slow(stragglers_.is_slow(member.id));
    entry->set_link_errors(member.link_errors);
  }
  return status;
}

}  // namespace muster
