// The part of Cluster that checks what must hold at any moment.
#include <fmt/format.h>

#include <set>
#include <string>

#include "coordinator/simulation/cluster.h"

namespace muster::simulation {

void Cluster::check_sent(const Process& process, const proto::Envelope& envelope) {
  const uint64_t newest = rosters_.empty() ? 0 : rosters_.rbegin()->first;
  switch (envelope.body_case()) {
    case proto::Envelope::kAssignment:
      return check_assignment(process, envelope.assignment());
    case proto::Envelope::kGoOver:
      require(
          envelope.go_over().generation() == newest && rosters_.at(newest)->assignment().prepare(),
          fmt::format("{} is to go over to generation {}", process.id(),
                      envelope.go_over().generation()));
      return check_resume_step(newest, envelope.go_over().resume_step());
    case proto::Envelope::kStepPlan:
      return check_plan(process, envelope.step_plan());
    case proto::Envelope::kHalt:
      return require(envelope.halt().generation() == newest,
                     fmt::format("Halt of generation {}, the newest assigned is {}",
                                 envelope.halt().generation(), newest));
    case proto::Envelope::kEndProcess: {
      const auto victim = by_id_.find(envelope.end_process().member_id());
      return require(
          victim == by_id_.end() || !victim->second->running() || victim->second->disturbed(),
          fmt::format("{} is to be killed, and was not even stopped: {}",
                      envelope.end_process().member_id(), envelope.end_process().reason()));
    }
    case proto::Envelope::kCheckpointResult:
      if (envelope.checkpoint_result().committed()) saved_ = envelope.checkpoint_result().step();
      return;
    default:
      return;
  }
}

void Cluster::check_assignment(const Process& process, const proto::Assignment& assignment) {
  const uint64_t generation = assignment.generation();
  const int world = assignment.world_size();
  const auto first = rosters_.find(generation);
  if (first == rosters_.end()) {
    const uint64_t newest = rosters_.empty() ? 0 : rosters_.rbegin()->first;
    require(generation == newest + 1,
            fmt::format("generation {} does not follow {}", generation, newest));
  } else {
    require(assignment.SerializeAsString() == first->second->assignment().SerializeAsString(),
            fmt::format("two members were told different things of generation {}", generation));
  }
  const ElasticConfig& elastic = options_.config.elastic;
  require(world >= 1 && (assignment.has_handover() ? world <= assignment.members_size()
                                                   : world == assignment.members_size()),
          fmt::format("generation {} of {} has {} members", generation, world,
                      assignment.members_size()));
  require(elastic.max_workers == 0 || world <= elastic.max_workers,
          fmt::format("generation {} has {} workers", generation, world));
  require(world <= options_.config.train.global_batch, "more workers than samples");
  std::set<std::string> ids;
  for (const auto& member : assignment.members()) {
    require(ids.insert(member.member_id()).second,
            fmt::format("{} is in generation {} twice", member.member_id(), generation));
    require(member.node() >= 0 && member.node() < assignment.nodes_size() &&
                assignment.nodes(member.node()).node_id() ==
                    by_id_.at(member.member_id())->agent()->id(),
            fmt::format("{} is said to be on another node", member.member_id()));
  }
  require(
      ids.contains(process.id()),
      fmt::format("{} is not in generation {}, which it was told of", process.id(), generation));
  if (!assignment.prepare()) check_resume_step(generation, assignment.resume_step());
  if (!assignment.has_handover()) return;
  const proto::Handover& handover = assignment.handover();
  require(handover.generation() < generation && handover.holders_size() > 0,
          fmt::format("the handover to generation {} is not whole", generation));
  std::set<int> giving;
  for (const int holder : handover.holders()) {
    require(holder >= 0 && holder < assignment.members_size(), "a holder is no member");
    giving.insert(holder);
  }
  for (int place = world; place < assignment.members_size(); ++place) {
    require(giving.contains(place),
            assignment.members(place).member_id() + " has neither a rank nor anything to give");
  }
  // The state of a step before the last committed one is there wherever one is lost alone.
  if (elastic.mirror_every == 1 && options_.times.mirror_memory_s == 0.0 && !assignment.prepare()) {
    require(assignment.resume_step() >= committed_ - 1,
            fmt::format("generation {} goes on from step {}, and step {} is committed", generation,
                        assignment.resume_step(), committed_));
  }
}

// The log forgets what comes after the step that is gone back to: behind a checkpoint, which may be
// needed yet, that would leave a gap.
void Cluster::check_resume_step(uint64_t generation, int64_t step) const {
  require(step >= saved_, fmt::format("generation {} begins at step {}, and step {} is saved",
                                      generation, step, saved_));
}

void Cluster::check_plan(const Process& process, const proto::StepPlan& plan) {
  require(plan.generation() >= planned_generation_,
          fmt::format("steps of generation {} after those of generation {}", plan.generation(),
                      planned_generation_));
  planned_generation_ = plan.generation();
  const Roster& generation = *roster(plan.generation());
  const auto world = static_cast<int>(generation.members->size());
  const int rank = generation.places.contains(&process) ? generation.rank_of(process) : -1;
  require(rank >= 0, fmt::format("{} is to train in generation {} and is not in it", process.id(),
                                 plan.generation()));
  for (const proto::PlannedStep& step : plan.steps()) {
    if (step.save_only()) continue;
    require(world >= options_.config.elastic.min_workers,
            fmt::format("{} workers train, and min_workers is {}", world,
                        options_.config.elastic.min_workers));
    const auto expected =
        order_.step_samples(step.step(), options_.config.train.global_batch, rank, world);
    require(std::vector<int64_t>(step.samples().begin(), step.samples().end()) == expected,
            fmt::format("{} was given other samples than those of step {} for rank {} of {}",
                        process.id(), step.step(), rank, world));
  }
}

void Cluster::check_session() {
  constexpr int64_t kEvery = 8;  // messages: it is the most costly of the checks
  if (messages_ % kEvery != 0) return;
  const proto::Status status = session_->status(now());
  require(status.step() <= options_.config.train.steps, "more steps than there are to train");
  const Phase phase = session_->phase();
  if (phase == Phase::kTraining || phase == Phase::kStopping) committed_ = status.step();
  std::set<int> ranks;
  for (const proto::MemberStatus& member : status.members()) {
    if (member.role() != proto::ROLE_WORKER || member.state() != "active") continue;
    if (member.rank() < 0) continue;
    require(ranks.insert(member.rank()).second,
            fmt::format("two workers have the rank {}", member.rank()));
  }
}

}  // namespace muster::simulation
