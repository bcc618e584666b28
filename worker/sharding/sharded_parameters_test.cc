#include "worker/sharding/sharded_parameters.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <map>
#include <mutex>

#include "common/error.h"
#include "worker/comm/testing.h"
#include "worker/sharding/testing.h"

namespace muster {
namespace {

using testing::HostStep;
using testing::run_groups;
using testing::run_ranks;
using testing::toy_pass;
using testing::toy_units;

constexpr int64_t kSamples = 6;

struct Result {
  std::vector<double> losses;
  std::vector<double> norms;
  std::vector<std::vector<float>> weights;  // whole units, put together from the ranks' state
};

struct Run {
  int world = 1;
  std::string mode = "full";
  int64_t prefetch = 1;
  int64_t steps = 50;
  // The step whose loss is not a number; -1: none.
  int64_t poisoned_step = -1;
  int group = 0;  // ranks of a shard group; 0: all
};

Result train(const Run& run) {
  Result result;
  std::mutex mutex;
  for (const UnitSpec& unit : toy_units()) result.weights.emplace_back(unit.numel());
  OptimizerConfig optimizer;
  optimizer.clip_norm = 0.5;
  run_groups(run.world, run.group > 0 ? run.group : run.world, [&](GroupedCommunicator& comm) {
    ShardedParameters parameters(toy_units(), comm.groups(),
                                 {.mode = run.mode, .prefetch_units = run.prefetch}, {});
    parameters.initialise(7);
    const int64_t passes = (kSamples + run.world - 1) / run.world;
    HostStep step_figures;
    for (int64_t step = 0; step < run.steps; ++step) {
      parameters.begin_step(passes);
      step_figures.begin();
      for (int64_t pass = 0; pass < passes; ++pass) {
        const int64_t sample = comm.rank() * passes + pass;
        const bool counts = sample < kSamples;
        const double loss = toy_pass(parameters, counts ? sample + step * kSamples : -1);
        step_figures.add(step == run.poisoned_step ? std::nan("") : loss, counts ? 1.0 : 0.0);
      }
      const StepControl control = step_figures.update(parameters, optimizer, 0.02);
      if (comm.rank() == 0) {
        result.losses.push_back(control.loss);
        result.norms.push_back(control.grad_norm);
      }
    }
    const std::lock_guard lock(mutex);
    for (const ShardState& state : parameters.state()) {
      std::copy_n(state.weight.data<float>(), state.range.size(),
                  result.weights[state.unit].begin() + state.range.begin);
    }
  });
  return result;
}

void expect_close(const Result& a, const Result& b, double relative) {
  ASSERT_EQ(a.losses.size(), b.losses.size());
  for (size_t i = 0; i < a.losses.size(); ++i) {
    ASSERT_NEAR(a.losses[i], b.losses[i], relative * std::abs(a.losses[i])) << "step " << i;
    ASSERT_NEAR(a.norms[i], b.norms[i], relative * std::abs(a.norms[i])) << "step " << i;
  }
  for (size_t unit = 0; unit < a.weights.size(); ++unit) {
    for (size_t i = 0; i < a.weights[unit].size(); ++i) {
      ASSERT_NEAR(a.weights[unit][i], b.weights[unit][i], 1e-4) << unit << " " << i;
    }
  }
}

TEST(ShardedParameters, EveryModeAndWorldTrainsTheSame) {
  const Result one = train({.world = 1, .mode = "full"});
  ASSERT_LT(one.losses.back(), 0.95 * one.losses.front()) << "the toy learns nothing";
  for (const std::string mode : {"full", "grad", "optimizer", "none"}) {
    for (const int world : {2, 3}) {
      SCOPED_TRACE(mode + " at " + std::to_string(world));
      expect_close(one, train({.world = world, .mode = mode}), 1e-5);
    }
  }
}

TEST(ShardedParameters, MoreRanksThanElementsOrSamples) {
  expect_close(train({.world = 1, .steps = 5}), train({.world = 7, .steps = 5}), 1e-5);
}

TEST(ShardedParameters, ShardGroupsTrainTheSame) {
  const Result one = train({.world = 1, .steps = 20});
  for (const std::string mode : {"full", "grad", "optimizer", "none"}) {
    for (const auto& [world, group] : {std::pair(4, 2), {6, 2}, {6, 3}}) {
      SCOPED_TRACE(mode + " at " + std::to_string(world) + " by " + std::to_string(group));
      expect_close(one, train({.world = world, .mode = mode, .steps = 20, .group = group}), 1e-5);
    }
  }
  const Result groups = train({.world = 4, .steps = 20, .group = 2});
  expect_close(train({.world = 4, .steps = 20}), groups, 1e-5);
  EXPECT_EQ(groups.weights, train({.world = 4, .prefetch = 9, .steps = 20, .group = 2}).weights);
  EXPECT_EQ(groups.weights, train({.world = 4, .mode = "grad", .steps = 20, .group = 2}).weights);
}

// Every element of weights and moments, as the ranks hold them: all replicas have the same bits,
// also after a step that nobody applies.
TEST(ShardedParameters, ReplicasStayEqualBitForBit) {
  constexpr int kWorld = 6;
  for (const int group : {2, 3}) {
    std::vector<std::vector<float>> used(kWorld);
    std::vector<StepControl> controls(kWorld);
    run_groups(kWorld, group, [&](GroupedCommunicator& comm) {
      ShardedParameters parameters(toy_units(), comm.groups(), {}, {});
      parameters.initialise(7);
      HostStep figures;
      for (int64_t step = 0; step < 5; ++step) {
        parameters.begin_step(2);
        figures.begin();
        if (step == 3 && comm.rank() == 4) {
          parameters.gradients(2)[1].data<float>()[23] = std::numeric_limits<float>::infinity();
        }
        for (int64_t pass = 0; pass < 2; ++pass) {
          figures.add(toy_pass(parameters, 12 * step + 2 * comm.rank() + pass), 1.0);
        }
        controls[comm.rank()] = figures.update(parameters, {}, 0.05);
        EXPECT_EQ(controls[comm.rank()].apply, step == 3 ? 0 : 1);
      }
      parameters.begin_pass({0, 1, 2, 3});
      for (const int unit : {0, 1, 2, 3}) {
        for (const ConstTensorView& view : parameters.use(unit)) {
          used[comm.rank()].insert(used[comm.rank()].end(), view.data<float>(),
                                   view.data<float>() + view.numel());
        }
        parameters.release(unit);
      }
    });
    for (int rank = 1; rank < kWorld; ++rank) {
      EXPECT_EQ(used[rank], used[0]) << "rank " << rank << " of groups of " << group;
      EXPECT_EQ(std::memcmp(&controls[rank], &controls[0], sizeof(StepControl)), 0);
    }
  }
}

// The same sums in the same order, whatever the timing and however far it gathers ahead.
TEST(ShardedParameters, SameWorldGivesTheSameBits) {
  const Result first = train({.world = 3, .mode = "full", .prefetch = 0, .steps = 5});
  for (const int64_t prefetch : {0, 1, 9}) {
    const Result again = train({.world = 3, .mode = "full", .prefetch = prefetch, .steps = 5});
    EXPECT_EQ(first.losses, again.losses) << prefetch;
    EXPECT_EQ(first.weights, again.weights) << prefetch;
  }
  // Gathered weights and reduced gradients are the same numbers in these pairs of modes.
  EXPECT_EQ(first.weights, train({.world = 3, .mode = "grad", .steps = 5}).weights);
  EXPECT_EQ(train({.world = 3, .mode = "optimizer", .steps = 5}).weights,
            train({.world = 3, .mode = "none", .steps = 5}).weights);
}

TEST(ShardedParameters, InitialWeightsDoNotDependOnTheWorld) {
  const Result one = train({.world = 1, .steps = 0});
  for (const std::string mode : {"full", "none"}) {
    EXPECT_EQ(one.weights, train({.world = 3, .mode = mode, .steps = 0}).weights);
  }
  const std::vector<UnitSpec> units = toy_units();
  EXPECT_EQ(one.weights[2][5], 1.0f);
  const Tensor initial({1}, DType::kFloat32);
  fill_initial({}, initial, 7, units[2].parameters[1], 4);
  EXPECT_EQ(one.weights[2][6 + 4], *initial.data<float>());
}

// A step that is not applied changes nothing but is otherwise whole: the next one works.
TEST(ShardedParameters, AStepThatIsNotAppliedChangesNothing) {
  for (const std::string mode : {"full", "none"}) {
    const Result before = train({.world = 2, .mode = mode, .steps = 3});
    const Result after = train({.world = 2, .mode = mode, .steps = 4, .poisoned_step = 3});
    EXPECT_EQ(before.weights, after.weights);
    EXPECT_GT(after.norms[3], 0.0);
  }
}

TEST(ShardedParameters, AllRanksSkipWhenOneGradientIsNotFinite) {
  for (const std::string mode : {"full", "grad", "optimizer", "none"}) {
    run_ranks(3, [&](Communicator& comm) {
      ShardedParameters parameters(toy_units(), comm, {.mode = mode}, {});
      parameters.initialise(7);
      const auto snapshot = [&] {
        std::vector<float> values;
        for (const ShardState& state : parameters.state()) {
          for (const TensorView& view : {state.weight, state.m, state.v}) {
            values.insert(values.end(), view.data<float>(), view.data<float>() + view.numel());
          }
        }
        return values;
      };
      const std::vector<float> before = snapshot();
      parameters.begin_step(1);
      const bool poison = comm.rank() == 1;
      if (poison) {
        parameters.gradients(2)[1].data<float>()[23] = std::numeric_limits<float>::infinity();
      }
      HostStep figures;
      figures.add(toy_pass(parameters, comm.rank()), 1.0);
      const StepControl control = figures.update(parameters, {}, 0.1);
      EXPECT_EQ(control.reason, SkipReason::kGradNormNotFinite) << mode << ", " << comm.rank();
      EXPECT_FALSE(std::isfinite(control.grad_norm));
      EXPECT_EQ(before, snapshot()) << mode << " on rank " << comm.rank();

      parameters.begin_step(1);
      figures.begin();
      figures.add(toy_pass(parameters, comm.rank()), 1.0);
      EXPECT_EQ(figures.update(parameters, {}, 0.1).apply, 1) << "the poison stayed";
    });
  }
}

// What is written through state() on its owner is what every rank uses.
TEST(ShardedParameters, WrittenStateReachesEveryRank) {
  const auto check = [](const Groups& groups, const std::string& mode) {
    ShardedParameters parameters(toy_units(), groups, {.mode = mode}, {});
    parameters.initialise(1);
    const auto whole = [&](int unit) {
      parameters.begin_pass({unit});
      std::vector<float> values;
      for (const ConstTensorView& view : parameters.use(unit)) {
        values.insert(values.end(), view.data<float>(), view.data<float>() + view.numel());
      }
      parameters.release(unit);
      return values;
    };
    whole(2);  // so that modes which keep gathered weights have some to drop
    for (const ShardState& state : parameters.state()) {
      for (int64_t i = 0; i < state.range.size(); ++i) {
        state.weight.data<float>()[i] = static_cast<float>(state.range.begin + i);
      }
    }
    parameters.weights_changed();
    const std::vector<float> values = whole(2);
    ASSERT_EQ(values.size(), 30u);
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_EQ(values[i], static_cast<float>(i)) << mode << " on rank " << groups.world.rank();
    }
  };
  for (const std::string mode : {"full", "grad", "optimizer", "none"}) {
    run_ranks(3, [&](Communicator& comm) { check(comm, mode); });
    run_groups(4, 2, [&](GroupedCommunicator& comm) { check(comm.groups(), mode); });
  }
}

// One rank computes on the masters themselves.
TEST(ShardedParameters, OneRankUsesWeightsInPlace) {
  run_ranks(1, [](Communicator& comm) {
    ShardedParameters parameters(toy_units(), comm, {}, {});
    parameters.initialise(1);
    parameters.begin_pass({0});
    EXPECT_EQ(parameters.use(0)[0].raw(), parameters.state()[0].weight.raw());
    parameters.release(0);
  });
}

// "full" holds no more than the units in use and ahead; the others keep what they gathered.
TEST(ShardedParameters, FullModeFreesWeightsAfterUse) {
  std::map<std::string, size_t> bytes;
  for (const std::string mode : {"full", "grad"}) {
    run_ranks(2, [&](Communicator& comm) {
      HostAllocator memory;
      ComputeContext context;
      context.allocator = &memory;
      ShardedParameters parameters(toy_units(), comm, {.mode = mode}, context);
      parameters.initialise(1);
      const size_t before = memory.bytes_in_use();
      parameters.begin_pass({0, 1, 2, 3});
      for (const int unit : {0, 1, 2, 3}) {
        parameters.use(unit);
        parameters.release(unit);
      }
      if (comm.rank() == 0) bytes[mode] = memory.bytes_in_use() - before;
    });
  }
  EXPECT_EQ(bytes["full"], 0u);
  EXPECT_GT(bytes["grad"], 0u);
}

TEST(ShardedParametersDeathTest, PassesMustBeAnnounced) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  run_ranks(1, [](Communicator& comm) {
    ShardedParameters parameters(toy_units(), comm, {}, {});
    parameters.initialise(1);
    parameters.begin_step(2);
    toy_pass(parameters, 0);
    HostStep figures;
    EXPECT_DEATH(figures.update(parameters, {}, 0.1), "fewer passes than announced");
    parameters.begin_pass({1, 2});
    EXPECT_DEATH(parameters.use(2), "out of the announced order");
  });
}

}  // namespace
}  // namespace muster
