#include "coordinator/training.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "common/check.h"
#include "common/error.h"
#include "common/logging.h"

namespace muster {

namespace {

// Further back than a recovery from memory can go.
constexpr size_t kRememberedSteps = 4096;

}  // namespace

std::string nothing_left(int64_t step, const Config& config) {
  return fmt::format(
      "nothing to do: the checkpoint of step {} is the end of a run of train.steps = {}; raise it "
      "to train on",
      step, config.train.steps);
}

Training::Training(const Config& config, const std::string& config_toml, const RunDir& run,
                   RunLog* log, const GenerationStart& start, SendToRank send)
    : config_(config),
      config_toml_(config_toml),
      run_(run),
      log_(log),
      start_(start),
      send_(std::move(send)),
      plan_options_{
          .total_steps = config.train.steps,
          .eval_every = config.train.eval_every,
          .save_every = config.checkpoint.every,
          .has_held_out = start.dataset.held_out_samples > 0 && config.train.eval_samples > 0},
      order_(config.run.seed, start.dataset.fingerprint, start.dataset.train_samples,
             config.data.shuffle),
      steps_(start.generation, world(), start.step),
      saves_(start.generation, world()),
      planned_(start.step),
      committed_(start.step),
      tokens_(start.tokens),
      mirrors_ready_(start.mirrors_ready),
      mirror_every_(mirror_interval(config.elastic.mirror_every, 0.0, 0.0)),
      mirror_behind_(config.elastic.mirror_every != 1),
      checkpoint_step_(start.checkpoint_step) {
  metrics_.step = start.step;
  for (const std::string& id : start_.members) ranks_.emplace(id, static_cast<int>(ranks_.size()));
}

int Training::rank_of(const std::string& member_id) const {
  const auto found = ranks_.find(member_id);
  return found == ranks_.end() ? -1 : found->second;
}

void Training::begin(double now) {
  save_begun_ = now;
  // A generation may take over the last step with its checkpoint lost on the way.
  last_planned_ = start_.step >= plan_options_.total_steps;
  if (start_.paused || last_planned_) plan_save();
  plan();
  finish_if_done();
}

void Training::leave(const std::string& reason) {
  if (leave_reason_) return;
  leave_reason_ = reason;
  if (start_.paused) {
    last_planned_ = true;
    if (checkpoint_step_ != committed_ && saves_.empty()) plan_save();
  }
  plan();
  finish_if_done();
}

void Training::expect_reports() {
  constexpr int64_t kMostAhead = 64;
  closed_ = true;
  for (int64_t i = 1; i <= kMostAhead; ++i) steps_.expect(committed_ + i, /*evaluate=*/false);
}

int64_t Training::close() {
  MUSTER_CHECK(!last_planned_);
  closed_ = true;
  return planned_;
}

void Training::break_off(int64_t step, double now) {
  closed_ = true;
  while (committed_ < step) {
    const std::vector<int> silent = steps_.missing();
    auto complete = steps_.take_incomplete();
    if (!complete) break;
    // What nobody is left to report of: ids are known, the hashes of their tokens are not.
    for (const int rank : silent) {
      for (const int64_t id :
           order_.step_samples(committed_ + 1, config_.train.global_batch, rank, world())) {
        complete->samples.push_back({id, 0});
      }
    }
    commit_step(*complete, now);
  }
  for (const int64_t saving : saves_.give_up()) {
    discard_partial(run_, saving);
    log_->event({.kind = "checkpoint_failed",
                 .reason = fmt::format("step {} was not saved: the generation broke off", saving),
                 .step = committed_,
                 .generation = start_.generation});
  }
}

// The state as it is.
void Training::plan_save() {
  if (checkpoint_step_ == committed_) return;
  saves_.expect(committed_);
  proto::Envelope envelope;
  envelope.mutable_step_plan()->set_generation(start_.generation);
  proto::PlannedStep* planned = envelope.mutable_step_plan()->add_steps();
  planned->set_step(committed_);
  planned->set_save(true);
  planned->set_save_only(true);
  planned->set_last(last_planned_);
  send_to_all(envelope);
}

void Training::send_to_all(const Message& message) {
  for (int rank = 0; rank < world(); ++rank) send_(rank, message);
}

// Whether the next step to be handed out carries the state that it starts from to the mirrors.
bool Training::mirror_next() {
  if (world() < 2 || mirror_every_ == 0 || !mirrors_ready_) return false;
  if (mirrored_ >= 0 && planned_ < mirrored_ + mirror_every_) return false;
  // There is memory for the last whole one and one more.
  if (mirrored_ >= 0 && sent_behind_ && whole_ < mirrored_) return false;
  // How often they pay shows with the first.
  if (mirrored_ >= 0 && config_.elastic.mirror_every < 0 && mirror_s_ == 0) return false;
  if (mirrored_ < 0 && !start_.mirrors_ready) {
    log_->event({.kind = "mirroring",
                 .reason = fmt::format("all workers have the memory for it: the state is kept "
                                       "twice from step {} on",
                                       planned_),
                 .step = committed_,
                 .generation = start_.generation});
  }
  if (mirrored_ < 0) first_mirrored_ = planned_;
  mirrored_ = planned_;
  sent_behind_ = mirror_behind_;
  return true;
}

bool Training::secured() const {
  if (committed_ == start_.step) return false;
  if (world() < 2 || mirror_every_ == 0 || checkpoint_step_ > start_.step) return true;
  return first_mirrored_ >= 0 && whole_ >= first_mirrored_;
}

void Training::plan() {
  if (closed_ || start_.paused) return;
  // A run that was asked to stop hands out exactly one step more, at once: the workers learn from
  // it that it is the last.
  const int64_t window = leaving() ? planned_ + 1 - committed_ : planning_window(metrics_.step_s);
  std::vector<proto::PlannedStep> steps;  // but for the samples, the same for all ranks
  while (!last_planned_ && planned_ < committed_ + window) {
    const bool mirror = mirror_next();
    const int64_t step = ++planned_;
    const StepFlags flags = step_flags(step, plan_options_, leaving());
    last_planned_ = flags.last;
    steps_.expect(step, flags.evaluate);
    if (flags.save) saves_.expect(step);
    proto::PlannedStep& planned = steps.emplace_back();
    planned.set_step(step);
    planned.set_global_samples(config_.train.global_batch);
    planned.set_evaluate(flags.evaluate);
    planned.set_save(flags.save);
    planned.set_last(flags.last);
    planned.set_mirror(mirror);
    planned.set_mirror_behind(mirror && sent_behind_);
    if (whole_ >= 0) planned.set_mirrored(whole_);
  }
  if (steps.empty()) return;
  for (int rank = 0; rank < world(); ++rank) {
    proto::Envelope envelope;
    envelope.mutable_step_plan()->set_generation(start_.generation);
    for (const proto::PlannedStep& step : steps) {
      proto::PlannedStep* mine = envelope.mutable_step_plan()->add_steps();
      *mine = step;
      const auto samples =
          order_.step_samples(step.step(), config_.train.global_batch, rank, world());
      mine->mutable_samples()->Add(samples.begin(), samples.end());
    }
    send_(rank, std::move(envelope));
  }
}

void Training::on_step_report(const proto::StepReport& report, double now) {
  steps_.add(report);
  commit_steps(now);
}

void Training::on_eval_report(const proto::EvalReport& report, double now) {
  steps_.add(report);
  commit_steps(now);
}

void Training::commit_steps(double now) {
  while (auto step = steps_.take()) commit_step(*step, now);
  plan();
  finish_if_done();
}

void Training::commit_step(const CompleteStep& step, double now) {
  committed_ = step.metrics.step;
  tokens_[committed_] = tokens_.at(committed_ - 1) + step.metrics.tokens;
  if (tokens_.size() > kRememberedSteps) {
    // Where this generation began it may go back to at any time.
    const auto oldest = tokens_.begin();
    tokens_.erase(oldest->first == start_.step ? std::next(oldest) : oldest);
  }
  metrics_ = step.metrics;
  metrics_.total_tokens = tokens();
  trained_s_ += metrics_.step_s;
  heed_mirrors(step);
  save_begun_ = now;
  log_->step(metrics_, step.samples);
  if (metrics_.skipped) {
    log_->event({.kind = "step_skipped",
                 .reason = fmt::format("the update of step {} was left out: {}", committed_,
                                       step.skip_reason),
                 .step = committed_,
                 .generation = start_.generation});
  }
  if (metrics_.has_held_out) {
    held_out_loss_ = metrics_.held_out_loss;
    log_->event({.kind = "evaluation",
                 .reason = fmt::format("held-out loss {:.4f} at step {}", metrics_.held_out_loss,
                                       committed_),
                 .step = committed_,
                 .generation = start_.generation});
  }
}

// How often the state is mirrored, and whether an update waits for it, follows from what the last
// mirror took.
void Training::heed_mirrors(const CompleteStep& step) {
  mirrors_ready_ = mirrors_ready_ || step.mirrors_ready;
  if (step.mirrored) whole_ = std::max(whole_, *step.mirrored);
  const int64_t configured = config_.elastic.mirror_every;
  if (metrics_.mirror_s > 0) {
    mirror_s_ = metrics_.mirror_s;
    mirror_every_ = mirror_interval(configured, mirror_s_, metrics_.step_s);
    // Sent while the step ran, it may be waited for.
    const bool in_time = whole_ >= committed_ - 1;
    if (configured < 0) mirror_behind_ = !in_time || mirror_every_ > 1;
  } else if (step.mirror_sent_s > 0) {
    const double cost = mirror_s_ + step.mirror_sent_s;
    mirror_every_ = mirror_interval(configured, cost, metrics_.step_s + cost);
  }
}

void Training::on_shard_saved(const proto::ShardSaved& saved, double now) {
  if (auto save = saves_.add(saved)) {
    finish_save(*save, now);
    finish_if_done();
  }
}

Manifest Training::manifest_of(const CompleteSave& save) const {
  Manifest manifest;
  manifest.step = save.step;
  manifest.generation = start_.generation;
  manifest.world_size = world();
  manifest.seed = config_.run.seed;
  manifest.tokens = tokens();
  manifest.global_batch = config_.train.global_batch;
  manifest.dataset = start_.dataset;
  manifest.config_toml = config_toml_;
  manifest.files = save.files;
  return manifest;
}

void Training::finish_save(const CompleteSave& save, double now) {
  std::string error = save.error;
  // A rank reports a step before it saves it and the next one after, so a save that is complete
  // finds its step the last committed one; anything else is a peer that breaks the protocol.
  if (error.empty() && save.step != committed_) {
    error = fmt::format("the shards of step {} came after step {} was committed", save.step,
                        committed_);
  }
  if (error.empty()) {
    try {
      commit_checkpoint(run_, manifest_of(save), save.worker_json);
    } catch (const Error& e) {
      error = e.what();
    }
  }
  if (error.empty()) {
    checkpoint_step_ = save.step;
    log_->checkpoint(save.step, start_.generation);
    prune_checkpoints(run_, config_.checkpoint.keep);
  } else {
    discard_partial(run_, save.step);
    spdlog::warn("the checkpoint of step {} failed: {}", save.step, error);
  }
  log_->event({.kind = error.empty() ? "checkpoint" : "checkpoint_failed",
               .reason = error.empty() ? fmt::format("step {} is saved", save.step)
                                       : fmt::format("step {} was not saved: {}", save.step, error),
               .duration_s = now - save_begun_,
               .step = save.step,
               .generation = start_.generation});
  if (last_planned_ && save.step == planned_) save_error_ = error;
  proto::Envelope envelope;
  envelope.mutable_checkpoint_result()->set_step(save.step);
  envelope.mutable_checkpoint_result()->set_committed(error.empty());
  envelope.mutable_checkpoint_result()->set_error(error);
  send_to_all(envelope);
}

void Training::finish_if_done() {
  if (outcome_ || !last_planned_ || committed_ < planned_ || !saves_.empty()) return;
  if (!save_error_.empty()) {
    outcome_ =
        Outcome{false, fmt::format("the last checkpoint, of step {}, could not be written: {}",
                                   committed_, save_error_)};
  } else if (committed_ >= plan_options_.total_steps) {
    outcome_ = Outcome{true, fmt::format("finished: {} steps", committed_)};
  } else {
    outcome_ = Outcome{true, fmt::format("stopped at step {} of {}, saved: {}", committed_,
                                         plan_options_.total_steps, *leave_reason_)};
  }
}

}  // namespace muster
