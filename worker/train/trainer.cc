#include "worker/train/trainer.h"

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

class Timer {
 public:
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

}  // namespace

Trainer::Trainer(const Config& config, const proto::Assignment& assignment, CoordinatorLink& link,
                 Communicator& communicator, DataClient& data, const ComputeContext& context)
    : config_(config),
      assignment_(assignment),
      link_(link),
      communicator_(communicator),
      data_(data),
      context_(context),
      model_(config.model, config.train.sequence_length, context),
      parameters_(model_.units(), communicator, config.parallel.shard,
                  config.parallel.prefetch_units, context),
      policy_(CheckpointPolicy::parse(config.memory.checkpoint)),
      batches_(data),
      empty_(config.train.sequence_length) {}

Trainer::Loaded Trainer::load() {
  if (assignment_.resume_step() == 0) {
    parameters_.initialise(config_.run.seed);
    return {.everywhere = true, .error = {}};
  }
  Loaded loaded;
  try {
    progress_ = load_checkpoint(assignment_.checkpoint_path(), model_.config(), model_.units(),
                                parameters_.state());
  } catch (const CheckpointError& error) {
    loaded.error = error.what();
  }
  // Nobody may go on to a collective that a rank without state will not join.
  double failures = loaded.error.empty() ? 0.0 : 1.0;
  communicator_.all_reduce(TensorView(&failures, DType::kFloat64, {1}))->wait(context_.stream);
  loaded.everywhere = failures == 0.0;
  if (loaded.everywhere) parameters_.weights_changed();
  return loaded;
}

void Trainer::run() {
  while (true) {
    const proto::PlannedStep step = next_step();
    proto::Envelope envelope;
    *envelope.mutable_step_report() = train_step(step);
    link_.send(std::move(envelope));
    if (step.evaluate()) evaluate(step.step());
    const bool saved = !step.save() || save(step.step());
    if (step.last()) {
      if (step.save() && saved) {
        link_.checkpoint_result(step.step(), patience());
      }
      return;
    }
  }
}

proto::StepReport Trainer::train_step(const proto::PlannedStep& step) {
  const Timer timer;
  const double data_wait = data_.data_wait_s();
  const double comm_wait = communicator_.wait_seconds();
  proto::StepReport report;
  const int64_t passes =
      pass_count(step.global_samples(), assignment_.world_size(), config_.train.micro_batch);

  parameters_.begin_step(passes);
  Totals mine;
  for (int64_t pass = 0; pass < passes; ++pass) {
    const Totals totals = train_pass(report);
    mine.loss += totals.loss;
    mine.tokens += totals.tokens;
  }
  const Totals all = sum_over_ranks(mine);
  const double loss = all.loss / all.tokens;

  GuardDecision guard = judge_loss(config_.train, progress_, loss);
  const double lr =
      learning_rate(config_.schedule, config_.optimizer.lr, step.step(), config_.train.steps);
  const UpdateResult update = parameters_.update(config_.optimizer, lr, progress_.updates + 1,
                                                 1.0 / all.tokens, guard.apply);
  if (guard.apply && update.skipped) {
    guard = {false, "the gradient norm is not finite"};
  }
  progress_ = advance(config_.train, progress_, loss, static_cast<int64_t>(all.tokens), guard.apply,
                      guard.reason);

  report.set_generation(assignment_.generation());
  report.set_rank(assignment_.rank());
  report.set_step(step.step());
  report.set_tokens(static_cast<int64_t>(all.tokens));
  report.set_loss(loss);
  report.set_grad_norm(update.grad_norm);
  report.set_lr(lr);
  report.set_step_s(timer.seconds());
  report.set_data_wait_s(data_.data_wait_s() - data_wait);
  report.set_comm_wait_s(communicator_.wait_seconds() - comm_wait);
  report.set_mem_bytes(static_cast<int64_t>(host_allocator().peak_bytes()));
  report.set_skipped(!guard.apply);
  report.set_skip_reason(guard.reason);
  return report;
}

Trainer::Totals Trainer::train_pass(proto::StepReport& report) {
  const Batch& batch = batches_.next(empty_.batch(), patience());
  Totals totals;
  totals.loss = model_.forward_backward(parameters_, batch, policy_);
  totals.tokens = static_cast<double>(batch.target_tokens);
  if (config_.metrics.debug_samples) note_samples(batch, report);
  batches_.release(batch);
  return totals;
}

void Trainer::evaluate(int64_t step) {
  const int64_t passes =
      pass_count(eval_samples(), assignment_.world_size(), config_.train.micro_batch);
  Totals mine;
  for (int64_t pass = 0; pass < passes; ++pass) {
    const Batch& batch = batches_.next(empty_.batch(), patience());
    mine.loss += model_.forward(parameters_, batch);
    mine.tokens += static_cast<double>(batch.target_tokens);
    batches_.release(batch);
  }
  const Totals all = sum_over_ranks(mine);
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
    const SavedShard shard = save_shard(folder, assignment_.rank(), assignment_.world_size(),
                                        model_.units(), parameters_.state());
    saved->set_file(shard.file);
    saved->set_bytes(shard.bytes);
    saved->set_xxh3(shard.xxh3);
    if (assignment_.rank() == 0) {
      saved->set_manifest_json(
          manifest_json(model_.config(), model_.units(), assignment_.world_size(), progress_));
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

Trainer::Totals Trainer::sum_over_ranks(Totals mine) {
  double values[2] = {mine.loss, mine.tokens};
  communicator_.all_reduce(TensorView(values, DType::kFloat64, {2}))->wait(context_.stream);
  return {values[0], values[1]};
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
