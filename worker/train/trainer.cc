#include "worker/train/trainer.h"

#include <algorithm>
#include <chrono>

#include "common/hash.h"
#include "common/host_memory.h"
#include "common/logging.h"
#include "common/run_dir.h"
#include "common/slice.h"
#include "worker/train/guard.h"
#include "worker/train/micro_batches.h"
#include "worker/train/schedule.h"

namespace muster {

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Trainer::Trainer(const Config& config, const Connections& connections, CoordinatorLink& link,
                 DataClient& data, const ComputeDevice& device, Vault& vault)
    : config_(config),
      assignment_(connections.assignment),
      rank_(connections.place.rank),
      handover_(connections.handover),
      link_(link),
      communicator_(*connections.communicator),
      data_(data),
      device_(device),
      vault_(vault),
      step_(config, communicator_.groups(), device.context()),
      batches_(data),
      empty_(config.train.sequence_length),
      done_(assignment_.resume_step()) {
  if (!connections.mirror) return;
  std::vector<std::string> nodes;
  const int world = assignment_.world_size();
  nodes.reserve(static_cast<size_t>(world));
  for (int rank = 0; rank < world; ++rank) {
    nodes.push_back(assignment_.nodes(assignment_.members(rank).node()).node_id());
  }
  const int group = static_cast<int>(shard_group_size(config.parallel, world));
  const int ward = mirror_ward(nodes, rank_);
  mirror_ =
      std::make_unique<Mirror>(connections.mirror,
                               MirrorOptions{.generation = assignment_.generation(),
                                             .part = part(),
                                             .holder = mirror_holder(nodes, rank_),
                                             .ward = ward,
                                             .ward_part = Placement{world, ward, group}.part(),
                                             .timeout_s = config.elastic.collective_timeout_s},
                               vault, device.context().stream);
}

// Once what is moved is where it belongs: memory that is being made would hold that up. All ranks
// are here.
void Trainer::prepare_mirror_memory() {
  if (!mirror_) return;
  const int world = assignment_.world_size();
  // Before anybody takes any.
  const std::optional<size_t> available = available_host_memory();
  std::vector<int64_t> lacking(static_cast<size_t>(world));
  const int64_t own = vault_.lacking(world);
  communicator_
      .all_gather(TensorView(lacking.data(), DType::kInt64, {world}),
                  ConstTensorView(&own, DType::kInt64, {1}))
      ->wait(Stream::cpu());
  const int node = assignment_.members(rank_).node();
  int64_t here = 0;
  for (int rank = 0; rank < world; ++rank) {
    if (assignment_.members(rank).node() == node) here += lacking[static_cast<size_t>(rank)];
  }
  vault_.prepare(world, here, config_.elastic.mirror_every == -1 ? available : std::nullopt);
}

bool Trainer::mirror_ready() const {
  return mirror_ && vault_.prepared(assignment_.world_size());
}

void Trainer::take_over(const HandoverPlan& plan) {
  set_progress(hand_over(handover_, plan, vault_, step_.parameters().state(), device_.context(),
                         {.timeout_s = config_.elastic.collective_timeout_s}));
  step_.parameters().weights_changed();
  prepare_mirror_memory();
}

void Trainer::set_progress(const TrainingProgress& progress) {
  progress_ = progress;
  StepControl control;
  control.updates = progress.updates;
  control.tokens = progress.tokens;
  control.loss_mean = progress.loss_mean;
  control.skips_in_row = progress.skips_in_row;
  step_.set_progress(control);
}

Trainer::Loaded Trainer::load() {
  if (assignment_.resume_step() == 0) {
    step_.parameters().initialise(config_.run.seed);
    prepare_mirror_memory();
    return {.everywhere = true, .error = {}};
  }
  Loaded loaded;
  TrainingProgress progress;
  try {
    progress = load_checkpoint(assignment_.checkpoint_path(), step_.model().config(),
                               step_.model().units(), step_.parameters().state(),
                               device_.context().stream);
  } catch (const CheckpointError& error) {
    loaded.error = error.what();
  }
  // Nobody may go on to a collective that a rank without state will not join.
  double failures = loaded.error.empty() ? 0.0 : 1.0;
  communicator_.all_reduce(TensorView(&failures, DType::kFloat64, {1}))->wait(Stream::cpu());
  loaded.everywhere = failures == 0.0;
  if (!loaded.everywhere) return loaded;
  step_.parameters().weights_changed();
  set_progress(progress);
  prepare_mirror_memory();
  return loaded;
}

Trainer::End Trainer::run(const std::function<void()>& between_steps) {
  link_.outlast_coordinator(assignment_.generation());
  try {
    return train(between_steps);
  } catch (const CoordinatorGone&) {
    keep_whole_state();
    throw;
  } catch (const PeerError&) {
    // A silent coordinator may be why the peer has left.
    if (assignment_.world_size() == 1 || link_.coordinator_silent()) keep_whole_state();
    throw;
  }
}

Trainer::End Trainer::train(const std::function<void()>& between_steps) {
  last_end_ = now();
  while (true) {
    between_steps();
    const std::optional<proto::PlannedStep> step = next_step();
    if (!step && link_.is_left(assignment_.generation())) break;
    if (!step) continue;  // there is something to do between steps
    if (!step->save_only()) carry_out(*step);
    const bool saved = !step->save() || save(step->step());
    if (step->last()) {
      if (step->save() && saved) {
        link_.checkpoint_result(assignment_.generation(), step->step(), patience());
      }
      return End::kFinished;
    }
    if (step->evaluate() || step->save()) last_end_ = now();
  }
  keep_state();
  return End::kGoesOver;
}

// Trains the step, reports what is known by then, and evaluates.
void Trainer::carry_out(const proto::PlannedStep& step) {
  train_step(step);
  // A GPU has the next step to compute while the host waits for the one before; on the CPU a step
  // has happened by now, and its report need not wait.
  const bool stay_ahead =
      device_.context().stream.device.is_cuda() && !(step.evaluate() || step.save() || step.last());
  while (under_way_.size() > (stay_ahead ? 1U : 0U)) {
    report_step(static_cast<int>(under_way_.size()) - 1);
  }
  if (step.evaluate()) evaluate(step.step());
}

// As it is after the last step, for the generation that follows: where it lies, as nothing trains
// on it any more.
void Trainer::keep_state() {
  vault_.stop_preparing();
  synchronize(device_.context().stream);
  const PieceId id{assignment_.generation(), assignment_.world_size(), part(), done_};
  ShardedParameters& parameters = step_.parameters();
  vault_.keep(std::make_shared<StatePiece>(id, parameters.state(), parameters.state_memory()),
              progress_);
}

// What this rank has is whole, unless an update was broken off. Where it is alone, and has no
// mirror, the end of its generation (such as by a coordinator that was started anew) need not cost
// a step; where the coordinator is gone for good it is what can be saved.
void Trainer::keep_whole_state() {
  if (updating_) return;
  // The youngest may be in its passes, which change nothing.
  if (!under_way_.empty() && under_way_.back().report.step() == 0) under_way_.pop_back();
  report_all();
  keep_state();
}

// Enqueues the step.
void Trainer::train_step(const proto::PlannedStep& step) {
  if (mirror_) mirror_->check();
  let_go_of(step);
  const bool mirrored = step.mirror() && mirror_;
  // There is memory for two versions, and the older one goes with the report of the last mirrored
  // step, or with a plan where that was sent behind it. A third would let a GPU go on without a
  // gap, for half as much memory again.
  if (mirrored && !under_way_.empty() && under_way_.back().mirrored) report_all();
  // Known where nothing is under way: on the CPU, and in the first step of a generation.
  const auto progress = under_way_.empty() ? std::optional(progress_) : std::nullopt;
  UnderWay& mine = under_way_.emplace_back();
  mine.begin = now();
  const double data_wait = data_.data_wait_s();
  const double comm_wait = communicator_.wait_seconds();
  const int64_t passes =
      pass_count(step.global_samples(), assignment_.world_size(), config_.train.micro_batch);
  mine.mirrored = mirrored;
  mine.behind = mirrored && step.mirror_behind();
  if (mirrored) {
    mirror_->start(step.step() - 1, step_.parameters().state(), progress);
  }
  step_.begin(passes);
  for (int64_t pass = 0; pass < passes; ++pass) {
    const Batch& batch = batches_.next(empty_.batch(), patience());
    step_.train(batch);
    if (config_.metrics.debug_samples) note_samples(batch, mine.report);
    batches_.release(batch);
  }
  if (mirrored) finish_mirror(mine);
  const double lr =
      learning_rate(config_.schedule, config_.optimizer.lr, step.step(), config_.train.steps);
  updating_ = true;
  step_.update(lr);
  updating_ = false;

  mine.report.set_generation(assignment_.generation());
  mine.report.set_rank(rank_);
  mine.report.set_step(step.step());
  mine.report.set_lr(lr);
  mine.tokens = step.global_samples() * config_.train.sequence_length;
  mine.report.set_data_wait_s(data_.data_wait_s() - data_wait);
  mine.report.set_comm_wait_s(communicator_.wait_seconds() - comm_wait);
}

// The update of the step is about to overwrite what is mirrored.
void Trainer::finish_mirror(UnderWay& mine) {
  // What the step before still computes is not this one's, nor the mirror's.
  while (under_way_.size() > 1) report_step(static_cast<int>(under_way_.size()) - 2);
  const double begin = now();
  mirror_->finish(mine.behind ? Mirror::Until::kCopied : Mirror::Until::kSent);
  double slower = now() - begin;
  // What a GPU computes beside its copies takes longer by up to as much.
  if (device_.context().stream.device.is_cuda()) slower += mirror_->copy_seconds();
  mine.report.set_mirror_s(slower);
  mirror_->keep(progress_);
}

// Nobody will need what is older than the state that all ranks have mirrored.
void Trainer::let_go_of(const proto::PlannedStep& step) {
  if (!step.has_mirrored()) return;
  vault_.commit(assignment_.generation(), step.mirrored());
  secured_ = true;
}

void Trainer::tell_mirrored(proto::StepReport& report) {
  const auto mirrored = mirror_ ? mirror_->mirrored() : std::nullopt;
  if (!mirrored) return;
  report.set_mirrored(*mirrored);
  // A GPU has nothing to do with it.
  const bool news = mirrored != std::exchange(told_mirrored_, mirrored);
  if (news && device_.context().stream.device.is_cpu()) {
    report.set_mirror_sent_s(mirror_->sent_seconds());
  }
}

// A step that is reported will not be undone by anybody alone: the state that it began from, where
// its update has waited for the mirrors, is what a recovery goes back to at most. As long as this
// generation has no mirror yet, and no checkpoint, what is left of the one before is kept: where
// this one began.
void Trainer::commit(const UnderWay& reported) {
  done_ = reported.report.step();
  // What is older than where this generation began is of no use, and would pile up.
  if (assignment_.has_handover()) vault_.commit(assignment_.handover().generation(), 0);
  if (reported.mirrored && !reported.behind) {
    vault_.commit(assignment_.generation(), done_ - 1);
    secured_ = true;
  } else if (!secured_ && (!mirror_ || link_.checkpoint_step() > assignment_.resume_step())) {
    vault_.commit(assignment_.generation(), 0);
    secured_ = true;
    // There may be room for it now.
    if (mirror_ && !mirror_ready()) {
      const int world = assignment_.world_size();
      vault_.prepare(world, vault_.lacking(world) * world, available_host_memory());
    }
  }
}

// Reports the oldest step under way; `behind` younger ones are on their way too.
void Trainer::report_step(int behind) {
  // Throws where the generation ends meanwhile. The step stays under way then: its update has
  // happened, and what is kept must not be taken for the state before it.
  const StepControl control = step_.outcome(behind, patience());
  UnderWay mine = std::move(under_way_.front());
  under_way_.pop_front();
  check_skips(config_.train, control);
  progress_ = {.updates = control.updates,
               .tokens = control.tokens,
               .loss_mean = control.loss_mean,
               .skips_in_row = control.skips_in_row};
  commit(mine);
  const double end = now();
  proto::StepReport& report = mine.report;
  report.set_tokens(static_cast<int64_t>(control.step_tokens));
  report.set_loss(control.loss);
  report.set_grad_norm(control.grad_norm);
  // Steps follow one another on the device; this one had it from the end of the one before.
  report.set_step_s(end - std::max(mine.begin, last_end_));
  report.set_model_flop(step_.model().training_flop(config_.train.sequence_length) *
                        static_cast<double>(mine.tokens));
  report.set_peak_flops(device_.peak_flops());
  report.set_mem_bytes(static_cast<int64_t>(device_.peak_bytes()));
  report.set_skipped(control.apply == 0);
  report.set_skip_reason(skip_reason(config_.train, control));
  report.set_mirror_ready(mirror_ready());
  tell_mirrored(report);
  last_end_ = end;
  proto::Envelope envelope;
  *envelope.mutable_step_report() = std::move(report);
  link_.send(std::move(envelope));
}

void Trainer::report_all() {
  while (!under_way_.empty()) report_step(static_cast<int>(under_way_.size()) - 1);
}

void Trainer::evaluate(int64_t step) {
  const int64_t passes =
      pass_count(eval_samples(), assignment_.world_size(), config_.train.micro_batch);
  step_.begin_evaluation();
  for (int64_t pass = 0; pass < passes; ++pass) {
    const Batch& batch = batches_.next(empty_.batch(), patience());
    step_.evaluate(batch);
    batches_.release(batch);
  }
  const TrainStep::Evaluation all = step_.end_evaluation(patience());
  if (rank_ != 0) return;
  proto::Envelope envelope;
  auto* report = envelope.mutable_eval_report();
  report->set_generation(assignment_.generation());
  report->set_step(step);
  report->set_loss(all.loss / all.tokens);
  report->set_tokens(static_cast<int64_t>(all.tokens));
  link_.send(std::move(envelope));
}

bool Trainer::save(int64_t step) {
  proto::Envelope envelope;
  auto* saved = envelope.mutable_shard_saved();
  saved->set_generation(assignment_.generation());
  saved->set_rank(rank_);
  saved->set_step(step);
  const std::string folder = RunDir{link_.welcome().run_dir()}.partial_checkpoint(step);
  try {
    saved->set_part(step_.parameters().part());
    const SavedShard shard =
        save_shard(folder, saved->part(), assignment_.world_size(), step_.model().units(),
                   step_.parameters().state(), device_.context().stream);
    saved->set_file(shard.file);
    saved->set_bytes(shard.bytes);
    saved->set_xxh3(shard.xxh3);
    if (rank_ == 0) {
      saved->set_manifest_json(manifest_json(step_.model().config(), step_.model().units(),
                                             assignment_.world_size(), progress_));
    }
  } catch (const IoError& error) {
    spdlog::error("the checkpoint of step {} was not written: {}", step, error.what());
    saved->set_error(error.what());
  }
  const bool ok = saved->error().empty();
  link_.send(std::move(envelope));
  return ok;
}

std::optional<proto::PlannedStep> Trainer::next_step() {
  const auto take_in = [this](proto::PlannedStep step) {
    if (!step.save_only()) plan_batches(step);
    planned_.push_back(std::move(step));
  };
  while (auto step = link_.poll_step(assignment_.generation())) take_in(std::move(*step));
  if (planned_.empty()) {
    // Nobody hands out steps while too few workers are there; what is under way need not wait.
    report_all();
    auto step = link_.next_step(assignment_.generation());
    if (!step) return std::nullopt;
    take_in(std::move(*step));
  }
  auto step = std::move(planned_.front());
  planned_.pop_front();
  return step;
}

void Trainer::plan_batches(const proto::PlannedStep& step) {
  const int world = assignment_.world_size();
  const int64_t micro = config_.train.micro_batch;
  batches_.plan(Split::kTrain, cut({step.samples().begin(), step.samples().end()},
                                   pass_count(step.global_samples(), world, micro)));
  if (!step.evaluate()) return;
  const Slice slice = slice_of(eval_samples(), rank_, world);
  std::vector<int64_t> samples;
  for (int64_t i = slice.begin; i < slice.end; ++i) samples.push_back(i);
  batches_.plan(Split::kHeldOut, cut(samples, pass_count(eval_samples(), world, micro)));
}

void Trainer::note_samples(const Batch& batch, proto::StepReport& report) const {
  const int64_t length = batch.sequence_length;
  for (size_t i = 0; i < batch.ids.size(); ++i) {
    report.add_samples(batch.ids[i]);
    const auto tokens = batch.tokens.slice(static_cast<int64_t>(i) * length,
                                           (static_cast<int64_t>(i) + 1) * length);
    report.add_sample_hashes(xxh3(tokens.raw(), tokens.bytes()));
  }
}

Deadline Trainer::patience() const {
  return Deadline::after(std::chrono::duration<double>(config_.elastic.collective_timeout_s));
}

int64_t Trainer::eval_samples() const {
  return std::min(config_.train.eval_samples, assignment_.held_out_samples());
}

}  // namespace muster
