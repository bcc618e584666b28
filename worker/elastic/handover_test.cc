#include "worker/elastic/handover.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "common/error.h"
#include "worker/comm/testing.h"
#include "worker/elastic/testing.h"

namespace muster {
namespace {

using testing::keep_filled;
using testing::wrong_elements;

constexpr uint64_t kGeneration = 7;
constexpr int64_t kStep = 12;

// A participant's connections. Messages between GPUs and between hosts are the same to a handover:
// here the former travel over Gloo too.
struct Connected {
  Connected(CommunicatorOptions options, Store& store, bool between_gpus)
      : links{.mesh = std::make_shared<GlooMesh>(options, store), .gpus = nullptr} {
    options.store_prefix = "gpus/";
    if (between_gpus) links.gpus = make_communicator(options, store);
  }
  void abort(const std::string& reason) const {
    links.mesh->abort(reason);
    if (links.gpus) links.gpus->abort(reason);
  }
  HandoverLinks links;
};

// Carries the plan out with a thread for each participant and checks every element of the result.
void check_handover(const HandoverPlan& common, const StateShape& shape, int64_t window,
                    bool between_gpus = false) {
  const auto body = [&](const HandoverLinks& links, int self) {
    HandoverPlan plan = common;
    plan.self = self;
    Vault vault(shape);
    for (int part = 0; part < plan.old_world(); ++part) {
      if (plan.holders[part] == self) {
        keep_filled(vault, {kGeneration, plan.old_world(), part, kStep});
      }
    }
    std::shared_ptr<StatePiece> target;
    for (int part = 0; part < plan.new_world(); ++part) {
      if (plan.owners[part] == self) target = vault.begin({8, plan.new_world(), part, kStep});
    }
    const std::vector<ShardState> none;
    const TrainingProgress progress = hand_over(links, plan, vault, target ? target->state() : none,
                                                {}, {.window = window, .timeout_s = 20.0});
    EXPECT_EQ(progress.updates, kStep);
    EXPECT_EQ(progress.tokens, kStep * 1000);
    if (target) {
      EXPECT_EQ(wrong_elements(target->state(), kStep), 0);
    }
  };
  if (common.participants == 1) return body({}, 0);
  const auto make = [&](const CommunicatorOptions& options, Store& store) {
    return std::make_unique<Connected>(options, store, between_gpus);
  };
  testing::run_ranks_of(common.participants, make, [&](const Connected& connected) {
    body(connected.links, connected.links.mesh->rank());
  });
}

// A change from W to W′ whose members, order and pieces are drawn at random.
HandoverPlan random_plan(std::mt19937& random) {
  const auto up_to = [&](int most) { return static_cast<int>(random() % most) + 1; };
  HandoverPlan plan{.generation = kGeneration, .step = kStep, .holders = {}, .owners = {}};
  const int new_world = up_to(5);
  const int old_world = up_to(5);
  const int holders = up_to(std::min(old_world, 3));
  const int others = static_cast<int>(random() % 2);  // holders that leave
  plan.participants = std::max(new_world + others, holders);
  for (int part = 0; part < new_world; ++part) plan.owners.push_back(part);
  std::shuffle(plan.owners.begin(), plan.owners.end(), random);
  std::vector<int> who(plan.participants);
  for (int i = 0; i < plan.participants; ++i) who[i] = i;
  std::shuffle(who.begin(), who.end(), random);
  // Where fewer hold the state than it has parts, some hold several.
  for (int part = 0; part < old_world; ++part) plan.holders.push_back(who[part % holders]);
  return plan;
}

TEST(Handover, MovesEveryElementWhereverItLies) {
  std::mt19937 random(1);
  for (int round = 0; round < 25; ++round) {
    const HandoverPlan plan = random_plan(random);
    StateShape shape;
    shape.moments = round % 2 == 0 ? DType::kFloat32 : DType::kBFloat16;
    for (int unit = 0; unit < 4; ++unit) {
      shape.units.push_back(static_cast<int64_t>(random() % (unit == 0 ? 4 : 300)) + 1);
    }
    const int64_t window = static_cast<int64_t>(random() % 90) + 10;
    SCOPED_TRACE("round " + std::to_string(round) + ": " + std::to_string(plan.old_world()) +
                 " to " + std::to_string(plan.new_world()));
    check_handover(plan, shape, window, /*between_gpus=*/round % 3 == 0);
  }
}

TEST(Handover, OfAWorldLargerThanAUnitHasElements) {
  HandoverPlan plan{.generation = kGeneration,
                    .step = kStep,
                    .participants = 6,
                    .holders = {0, 1, 2, 3, 4, 5},
                    .owners = {3, 1, 0, 2, 4}};
  check_handover(plan, {.units = {3, 1, 7}, .moments = DType::kFloat32}, 2);
}

TEST(Handover, OfOneMemberNeedsNoMesh) {
  HandoverPlan plan{.generation = kGeneration,
                    .step = kStep,
                    .participants = 1,
                    .holders = {0, 0, 0},
                    .owners = {0}};
  check_handover(plan, {.units = {100, 3}, .moments = DType::kFloat32}, 16);
}

TEST(Handover, SaysWhichPieceIsMissing) {
  const Vault vault(StateShape{{10}, DType::kFloat32});
  const HandoverPlan plan{.generation = kGeneration, .step = kStep, .holders = {0}, .owners = {0}};
  try {
    hand_over({}, plan, vault, {}, {});
    FAIL() << "the vault is empty";
  } catch (const PeerError& error) {
    EXPECT_STREQ(error.what(),
                 "handover: this worker does not hold part 0 of 1 of generation 7 after step 12");
  }
}

proto::Assignment assignment_of(const std::vector<std::string>& members,
                                const std::vector<std::string>& holders) {
  proto::Assignment assignment;
  assignment.set_generation(8);
  assignment.set_world_size(static_cast<int>(members.size()));
  assignment.set_resume_step(kStep);
  std::vector<std::string> all = members;
  auto* handover = assignment.mutable_handover();
  handover->set_generation(kGeneration);
  for (const std::string& holder : holders) {
    const auto found = std::find(all.begin(), all.end(), holder);
    handover->add_holders(static_cast<int>(found - all.begin()));
    if (found == all.end()) all.push_back(holder);
  }
  for (const std::string& id : all) assignment.add_members()->set_member_id(id);
  return assignment;
}

TEST(PlanHandover, KnowsWhoHasAndWhoGetsWhichPart) {
  const auto assignment = assignment_of({"a", "b", "c", "d"}, {"x", "c"});
  const HandoverPlan whole = plan_handover(assignment, 4, "x");
  EXPECT_EQ(whole.self, 4);
  EXPECT_EQ(whole.participants, 5);
  EXPECT_EQ(whole.holders, (std::vector<int>{4, 2}));
  EXPECT_EQ(whole.owners, (std::vector<int>{0, 1, 2, 3}));
  // Groups {a, b} and {c, d}: a's half are parts 0 and 1, of which c has the second.
  EXPECT_EQ(plan_handover(assignment, 2, "x").owners, (std::vector<int>{0, 2, 1, 3}));
}

TEST(PlanHandover, RefusesAMemberThatDoesNotTakePart) {
  const auto assignment = assignment_of({"a"}, {"a"});
  EXPECT_THROW(plan_handover(assignment, 1, "b"), PeerError);
}

TEST(PlanHandover, RefusesHoldersThatAreNoMembers) {
  auto assignment = assignment_of({"a"}, {"a"});
  assignment.mutable_handover()->add_holders(1);
  EXPECT_THROW(plan_handover(assignment, 1, "a"), PeerError);
}

}  // namespace
}  // namespace muster
