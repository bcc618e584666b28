// The part of Worker that trains steps.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "coordinator/simulation/cluster.h"
#include "coordinator/simulation/history.h"
#include "coordinator/simulation/worker.h"

namespace muster::simulation {

namespace {

// How often a worker that needs its data service looks for it.
constexpr double kDataPollS = 0.05;

}  // namespace

void Worker::begin(const proto::PlannedStep& step) {
  busy_ = true;
  if (step.save_only()) {
    cluster_.require(
        step.step() == place_->step,
        fmt::format("{} is at step {} and is to save step {}", id(), place_->step, step.step()));
    return save(step);
  }
  cluster_.require(step.step() == place_->step + 1,
                   fmt::format("{} is at step {} and is to train step {} of generation {}", id(),
                               place_->step, step.step(), place_->generation));
  let_go_of(step);
  cluster_.on_step_begin(*this, step.step());
  data_deadline_ = cluster_.now() + cluster_.options().config.elastic.collective_timeout_s;
  wait_for_data(step);
}

void Worker::let_go_of(const proto::PlannedStep& step) {
  if (!step.has_mirrored()) return;
  PieceKey own = piece(place_->part);
  own.step = place_->mirrored.value_or(-1);
  cluster_.require(
      own.step >= step.mirrored() && vault_.find(own),
      fmt::format("{} is told that step {} is mirrored, and it is not", id(), step.mirrored()));
  vault_.commit(place_->generation, step.mirrored());
  place_->secured = true;
}

void Worker::wait_for_data(const proto::PlannedStep& step) {
  const DataService* data = agent()->data();
  if (data != nullptr && data->serving() && data->endpoint() == endpoint_) return pass(step);
  if (cluster_.now() > data_deadline_) return fail("the data service does not deliver");
  later(kDataPollS, [this, step] { wait_for_data(step); });
}

void Worker::pass(const proto::PlannedStep& step) {
  const Times& times = cluster_.options().times;
  missing_ = 1;
  if (step.mirror()) mirror(step);
  later(times.step_s * cluster_.dice().uniform(0.3, 0.5), [this, step] {
    operate(MeshKind::kTrain, fmt::format("passes {}", step.step()), place_->roster->members,
            static_cast<size_t>(place_->rank), cluster_.options().times.step_s * 0.3,
            {.samples = {step.samples().begin(), step.samples().end()}, .pieces = {}},
            [this, step](const Gathered& gathered) {
              // Applied by update(): the gradients are there, the weights still the old ones.
              gradients_ = gathered.samples;
              part_done(step);
            });
  });
}

// The state that the step starts from: own copy, to the holder, from the ward.
void Worker::mirror(const proto::PlannedStep& step) {
  const auto& members = *place_->roster->members;
  const int world = place_->world;
  const int shift = place_->roster->mirror_shift;
  cluster_.require(shift > 0, "a mirror is planned for one worker alone");
  const int holder = (place_->rank + shift) % world;
  const int ward = (place_->rank + world - shift) % world;
  cluster_.require(mirror_ready(), id() + " is to mirror and has no memory for it");
  cluster_.require(sending_ == 0, id() + " is to mirror and still sends the last one");
  const PieceKey own = piece(place_->part);
  const uint64_t history = place_->history;
  ++missing_;
  later(cluster_.options().times.mirror_s * 0.2, [this, step, own, history] {
    vault_.put(own, history);
    part_done(step);
  });
  sending_ = 2;
  const bool waits = !step.mirror_behind();
  if (waits) missing_ += 2;
  const auto sent = [this, step, waits] {
    if (--sending_ == 0) place_->mirrored = step.step() - 1;
    if (waits) part_done(step);
  };
  const auto pair = [&](int from, int to) {
    return std::make_shared<const std::vector<Process*>>(std::vector<Process*>{
        members[static_cast<size_t>(from)], members[static_cast<size_t>(to)]});
  };
  operate(MeshKind::kTrain, fmt::format("mirror {} of {}", step.step(), place_->rank),
          pair(place_->rank, holder), 0, cluster_.options().times.mirror_s,
          {.samples = {}, .pieces = {{place_->part, place_->history}}},
          [sent](const Gathered&) { sent(); });
  operate(MeshKind::kTrain, fmt::format("mirror {} of {}", step.step(), ward),
          pair(ward, place_->rank), 1, cluster_.options().times.mirror_s, {},
          [this, own, sent](const Gathered& gathered) {
            PieceKey theirs = own;
            const auto& [part, their_history] = *gathered.pieces.begin();
            theirs.part = part;
            vault_.put(theirs, their_history);
            sent();
          });
}

void Worker::part_done(const proto::PlannedStep& step) {
  if (--missing_ == 0) update(step);
}

void Worker::update(const proto::PlannedStep& step) {
  operate(MeshKind::kTrain, fmt::format("update {}", step.step()), place_->roster->members,
          static_cast<size_t>(place_->rank), cluster_.options().times.step_s * 0.2, {},
          [this, step](const Gathered&) {
            place_->history = next_history(place_->history, step.step(), gradients_);
            place_->step = step.step();
            cluster_.on_step_end(*this, step.step());
            report(step);
          });
}

bool Worker::mirror_ready() const {
  return cluster_.now() >= place_->memory_at;
}

void Worker::report(const proto::PlannedStep& step) {
  const bool mirrors = place_->world > 1 && cluster_.options().config.elastic.mirror_every != 0;
  if (step.mirror() && !step.mirror_behind()) {
    vault_.commit(place_->generation, step.step() - 1);
    place_->secured = true;
  } else if (!place_->secured && (!mirrors || saved_ > place_->begin)) {
    vault_.commit(place_->generation, 0);
    place_->secured = true;
  }
  proto::Envelope envelope;
  proto::StepReport* report = envelope.mutable_step_report();
  report->set_generation(place_->generation);
  report->set_rank(place_->rank);
  report->set_step(step.step());
  report->set_tokens(step.global_samples());
  report->set_loss(loss_of(place_->history));
  report->set_step_s(cluster_.options().times.step_s);
  report->set_mirror_ready(mirror_ready());
  report->set_mirror_s(step.mirror() ? cluster_.options().times.mirror_s * 0.01 : 0.0);
  if (place_->mirrored) report->set_mirrored(*place_->mirrored);
  for (const int64_t sample : step.samples()) {
    report->add_samples(sample);
    report->add_sample_hashes(static_cast<uint64_t>(sample) + kSampleHash);
  }
  say(envelope);
  if (!step.evaluate()) return after_report(step);
  operate(MeshKind::kTrain, fmt::format("evaluate {}", step.step()), place_->roster->members,
          static_cast<size_t>(place_->rank), cluster_.options().times.step_s * 0.5, {},
          [this, step](const Gathered&) {
            if (place_->rank == 0) {
              proto::Envelope told;
              told.mutable_eval_report()->set_generation(place_->generation);
              told.mutable_eval_report()->set_step(step.step());
              told.mutable_eval_report()->set_loss(1.0);
              told.mutable_eval_report()->set_tokens(1);
              say(told);
            }
            after_report(step);
          });
}

void Worker::after_report(const proto::PlannedStep& step) {
  if (step.save()) {
    save(step);
  } else {
    end_step(step);
  }
}

void Worker::save(const proto::PlannedStep& step) {
  later(cluster_.options().times.save_s * cluster_.dice().uniform(0.5, 1.0), [this, step] {
    proto::Envelope envelope;
    proto::ShardSaved* saved = envelope.mutable_shard_saved();
    saved->set_generation(place_->generation);
    saved->set_rank(place_->rank);
    saved->set_step(step.step());
    saved->set_part(place_->part);
    cluster_.save_shard(saved, place_->world, place_->history);
    if (place_->rank == 0) saved->set_manifest_json("{}");
    say(envelope);
    end_step(step);
  });
}

void Worker::end_step(const proto::PlannedStep& step) {
  busy_ = false;
  // Then the checkpoint's fate and Stop are waited for.
  if (step.last()) return set_state(State::kDone);
  next();
}

}  // namespace muster::simulation
