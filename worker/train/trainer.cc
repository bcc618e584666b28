#include "worker/train/trainer.h"

#include <algorithm>
#include <chrono>

#include "common/hash.h"
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

Trainer::Trainer(const Config& config, const proto::Assignment& assignment, CoordinatorLink& link,
                 const Groups& groups, DataClient& data, const ComputeDevice& device)
    : config_(config),
      assignment_(assignment),
      link_(link),
      communicator_(groups.world),
      data_(data),
      device_(device),
      step_(config, groups, device.context()),
      batches_(data),
      empty_(config.train.sequence_length) {}

Trainer::Loaded Trainer::load() {
  if (assignment_.resume_step() == 0) {
    step_.parameters().initialise(config_.run.seed);
    return {.everywhere = true, .error = {}};
  }
  Loaded loaded;
  try {
    progress_ = load_checkpoint(assignment_.checkpoint_path(), step_.model().config(),
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
  StepControl control;
  control.updates = progress_.updates;
  control.tokens = progress_.tokens;
  control.loss_mean = progress_.loss_mean;
  control.skips_in_row = progress_.skips_in_row;
  step_.set_progress(control);
  return loaded;
}

void Trainer::run() {
  last_end_ = now();
  while (true) {
    const proto::PlannedStep step = next_step();
    train_step(step);
    // A GPU has the next step to compute while the host waits for the one before; on the CPU a step
    // has happened by now, and its report need not wait.
    const bool stay_ahead = device_.context().stream.device.is_cuda() &&
                            !(step.evaluate() || step.save() || step.last());
    while (under_way_.size() > (stay_ahead ? 1U : 0U)) {
      report_step(static_cast<int>(under_way_.size()) - 1);
    }
    if (step.evaluate()) evaluate(step.step());
    const bool saved = !step.save() || save(step.step());
    if (step.last()) {
      if (step.save() && saved) {
        link_.checkpoint_result(step.step(), patience());
      }
      return;
    }
    if (step.evaluate() || step.save()) last_end_ = now();
  }
}

// Enqueues the step.
void Trainer::train_step(const proto::PlannedStep& step) {
  UnderWay& mine = under_way_.emplace_back();
  mine.begin = now();
  const double data_wait = data_.data_wait_s();
  const double comm_wait = communicator_.wait_seconds();
  const int64_t passes =
      pass_count(step.global_samples(), assignment_.world_size(), config_.train.micro_batch);
  step_.begin(passes);
  for (int64_t pass = 0; pass < passes; ++pass) {
    const Batch& batch = batches_.next(empty_.batch(), patience());
    step_.train(batch);
    if (config_.metrics.debug_samples) note_samples(batch, mine.report);
    batches_.release(batch);
  }
  const double lr =
      learning_rate(config_.schedule, config_.optimizer.lr, step.step(), config_.train.steps);
  step_.update(lr);

  mine.report.set_generation(assignment_.generation());
  mine.report.set_rank(assignment_.rank());
  mine.report.set_step(step.step());
  mine.report.set_lr(lr);
  mine.tokens = step.global_samples() * config_.train.sequence_length;
  mine.report.set_data_wait_s(data_.data_wait_s() - data_wait);
  mine.report.set_comm_wait_s(communicator_.wait_seconds() - comm_wait);
}

// Reports the oldest step under way; `behind` younger ones are on their way too.
void Trainer::report_step(int behind) {
  UnderWay mine = std::move(under_way_.front());
  under_way_.pop_front();
  const StepControl control = step_.outcome(behind, patience());
  check_skips(config_.train, control);
  progress_ = {.updates = control.updates,
               .tokens = control.tokens,
               .loss_mean = control.loss_mean,
               .skips_in_row = control.skips_in_row};
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
  last_end_ = end;
  proto::Envelope envelope;
  *envelope.mutable_step_report() = std::move(report);
  link_.send(std::move(envelope));
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
  if (assignment_.rank() != 0) return;
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
  saved->set_rank(assignment_.rank());
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
    if (assignment_.rank() == 0) {
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

proto::PlannedStep Trainer::next_step() {
  while (auto step = link_.poll_step()) {
    plan_batches(*step);
    planned_.push_back(std::move(*step));
  }
  if (planned_.empty()) {
    auto step = link_.next_step(patience());
    plan_batches(step);
    planned_.push_back(std::move(step));
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
  const Slice slice = slice_of(eval_samples(), assignment_.rank(), world);
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
