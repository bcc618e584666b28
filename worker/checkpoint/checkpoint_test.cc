#include "worker/checkpoint/checkpoint.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>

#include "common/error.h"
#include "worker/checkpoint/testing.h"
#include "worker/comm/testing.h"

namespace muster {
namespace {

using testing::toy_config;
using testing::toy_units;
using testing::ToyState;
using testing::write_toy_checkpoint;

constexpr TrainingProgress kProgress{123, 456789, 2.0 / 3.0, 2};

bool same_bits(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(a[i].data<float>(), b[i].data<float>(), a[i].bytes()) != 0) return false;
  }
  return true;
}

class Checkpoint : public ::testing::Test {
 protected:
  void save(int world_size) const { write_toy_checkpoint(folder_, saved_, world_size, kProgress); }
  TrainingProgress load(const ToyState& into, int world_size = 1, int rank = 0) const {
    return load_checkpoint(folder_, toy_config(), toy_units(), into.part(world_size, rank));
  }
  // The message with which loading fails; "" if it does not.
  std::string error(const std::function<void()>& what) const {
    try {
      what();
    } catch (const CheckpointError& e) {
      return e.what();
    }
    return "";
  }
  std::string load_error() const {
    return error([&] { load(ToyState(2)); });
  }
  std::string shard(int rank, int world) const {
    char name[64];
    std::snprintf(name, sizeof(name), "/shard-%05d-of-%05d.safetensors", rank, world);
    return folder_ + name;
  }
  void edit_manifest(const std::function<void(nlohmann::json&)>& edit) const {
    nlohmann::json manifest = nlohmann::json::parse(read_file(folder_ + "/manifest.json"));
    edit(manifest);
    write_file_atomic(folder_ + "/manifest.json", manifest.dump());
  }

  const TempDir temp_{"checkpoint"};
  const std::string folder_ = temp_.path() + "/step-00000100";
  const ToyState saved_{1};
};

// A step with what was loaded into the groups; the weights after it. The moments count in it.
std::vector<float> step_from(const std::string& folder, const Groups& groups) {
  ShardedParameters parameters(toy_units(), groups, {}, {});
  load_checkpoint(folder, toy_config(), toy_units(), parameters.state());
  parameters.weights_changed();
  testing::HostStep figures;
  parameters.begin_step(1);
  figures.begin();
  // All samples count on rank 0, so that the order of sums is the same in every world.
  figures.add(testing::toy_pass(parameters, groups.world.rank() == 0 ? 5 : -1), 1.0);
  figures.update(parameters, {}, 0.05);
  std::vector<float> weights;
  parameters.begin_pass({0, 1, 2, 3});
  for (const int unit : {0, 1, 2, 3}) {
    for (const ConstTensorView& view : parameters.use(unit)) {
      weights.insert(weights.end(), view.data<float>(), view.data<float>() + view.numel());
    }
    parameters.release(unit);
  }
  return weights;
}

// What shard groups save and load is what a world of that size does.
TEST_F(Checkpoint, ShardGroupsLeaveNoTrace) {
  for (const Tensor& v : saved_.v) {  // means of squares
    float* const values = v.view().data<float>();
    for (int64_t i = 0; i < v.view().numel(); ++i) values[i] = std::abs(values[i]);
  }
  save(1);
  std::vector<float> expected;
  testing::run_groups(
      1, 1, [&](GroupedCommunicator& comm) { expected = step_from(folder_, comm.groups()); });
  const std::pair<int, int> worlds[] = {{4, 2}, {3, 3}, {6, 3}, {6, 2}, {6, 1}};
  for (const auto& [old_world, old_group] : worlds) {
    std::filesystem::remove_all(folder_);
    save(old_world);
    const std::string manifest = read_file(folder_ + "/manifest.json");
    testing::run_groups(old_world, old_group, [&](GroupedCommunicator& comm) {
      const bool alone = old_group == 1;
      ShardedParameters parameters(toy_units(), comm.groups(), {.mode = alone ? "none" : "full"},
                                   {});
      const int part = parameters.part();
      const std::vector<ShardState> values = saved_.part(old_world, part);
      const std::vector<ShardState> state = parameters.state();
      for (size_t unit = 0; unit < state.size(); ++unit) {
        EXPECT_EQ(state[unit].range, values[unit].range);
        const auto write = [](TensorView to, ConstTensorView from) {
          std::copy_n(from.data<float>(), from.numel(), to.data<float>());
        };
        write(state[unit].weight, values[unit].weight);
        write(state[unit].m, values[unit].m);
        write(state[unit].v, values[unit].v);
      }
      parameters.weights_changed();
      save_shard(folder_, part, old_world, toy_units(), parameters.state());
    });
    // The manifest has the hashes of the shards that a world without groups writes.
    EXPECT_EQ(read_file(folder_ + "/manifest.json"), manifest);
    for (const auto& [new_world, new_group] : worlds) {
      SCOPED_TRACE(
          fmt::format("{} by {} into {} by {}", old_world, old_group, new_world, new_group));
      if (new_group == 1) continue;
      testing::run_groups(new_world, new_group, [&](GroupedCommunicator& comm) {
        const std::vector<float> weights = step_from(folder_, comm.groups());
        ASSERT_EQ(weights.size(), expected.size());
        for (size_t i = 0; i < weights.size(); ++i) {
          EXPECT_NEAR(weights[i], expected[i], 1e-5 * std::abs(expected[i])) << i;
        }
      });
    }
  }
}

TEST_F(Checkpoint, AnyWorldLoadsWhatAnyOtherSaved) {
  for (const int old_world : {1, 2, 3, 5, 40}) {
    std::filesystem::remove_all(folder_);
    save(old_world);
    for (const int new_world : {1, 2, 3, 5, 40}) {
      const ToyState loaded(2);
      for (int rank = 0; rank < new_world; ++rank) {
        const TrainingProgress progress = load(loaded, new_world, rank);
        EXPECT_EQ(progress.updates, kProgress.updates);
        EXPECT_EQ(progress.tokens, kProgress.tokens);
        EXPECT_EQ(progress.loss_mean, kProgress.loss_mean);
        EXPECT_EQ(progress.skips_in_row, kProgress.skips_in_row);
      }
      EXPECT_TRUE(same_bits(loaded.weight, saved_.weight)) << old_world << " to " << new_world;
      EXPECT_TRUE(same_bits(loaded.m, saved_.m)) << old_world << " to " << new_world;
      EXPECT_TRUE(same_bits(loaded.v, saved_.v)) << old_world << " to " << new_world;
    }
  }
}

TEST_F(Checkpoint, MomentsMayBeLeftOut) {
  save(2);
  const ToyState loaded(2);
  std::vector<ShardState> state = loaded.part(1, 0);
  for (ShardState& one : state) one.m = one.v = TensorView();
  load_checkpoint(folder_, toy_config(), toy_units(), state);
  EXPECT_TRUE(same_bits(loaded.weight, saved_.weight));
  EXPECT_TRUE(same_bits(loaded.m, ToyState(2).m));
}

TEST_F(Checkpoint, ConfigAndModelForGenerate) {
  save(1);
  EXPECT_EQ(checkpoint_config_toml(folder_), "[run]\nname = \"toy\"\n");
  EXPECT_EQ(checkpoint_model(folder_).width, toy_config().width);
}

TEST_F(Checkpoint, MissingShardIsNamed) {
  save(3);
  std::filesystem::remove(shard(1, 3));
  const std::string message = load_error();
  EXPECT_NE(message.find(shard(1, 3)), std::string::npos) << message;
  EXPECT_NE(message.find("missing"), std::string::npos) << message;
}

TEST_F(Checkpoint, TornShardIsNamed) {
  save(3);
  std::filesystem::resize_file(shard(2, 3), 100);
  const std::string message = load_error();
  EXPECT_NE(message.find(shard(2, 3)), std::string::npos) << message;
  EXPECT_NE(message.find("torn: 100 bytes of"), std::string::npos) << message;
}

TEST_F(Checkpoint, AFlippedBitAnywhereIsFound) {
  save(2);
  const std::string content = read_file(shard(1, 2));
  for (size_t at = 0; at < content.size(); at += 37) {
    std::string damaged = content;
    damaged[at] = static_cast<char>(damaged[at] ^ 1);
    std::ofstream(shard(1, 2), std::ios::binary | std::ios::trunc) << damaged;
    const std::string message = load_error();
    ASSERT_NE(message.find(shard(1, 2)), std::string::npos) << at << ": " << message;
    ASSERT_NE(message.find("damaged"), std::string::npos) << at << ": " << message;
  }
}

// A rank reads, and so vouches for, only the files that hold its part.
TEST_F(Checkpoint, ARankNeedsOnlyItsOwnFiles) {
  save(3);
  std::filesystem::remove(shard(1, 3));
  const ToyState loaded(2);
  EXPECT_EQ(error([&] { load(loaded, 3, 0); }), "");
  EXPECT_NE(error([&] { load(loaded, 3, 1); }), "");
}

TEST_F(Checkpoint, SwappedShardsAreRefused) {
  save(2);
  edit_manifest(
      [](nlohmann::json& manifest) { std::swap(manifest["files"][0], manifest["files"][1]); });
  const std::string message = load_error();
  EXPECT_NE(message.find("embedding"), std::string::npos) << message;
  EXPECT_NE(message.find("0:9"), std::string::npos) << message;
}

TEST_F(Checkpoint, ManifestsThatCannotBeUsedAreNamed) {
  save(2);
  const std::string path = folder_ + "/manifest.json";
  const std::string good = read_file(path);
  const auto expect_error = [&](const std::string& part) {
    const std::string message = load_error();
    EXPECT_NE(message.find(path), std::string::npos) << message;
    EXPECT_NE(message.find(part), std::string::npos) << message;
    write_file_atomic(path, good);
  };
  std::filesystem::remove(path);
  expect_error("never completed");
  write_file_atomic(path, good.substr(0, good.size() / 2));
  expect_error("torn");
  edit_manifest([](nlohmann::json& manifest) { manifest["format"] = 2; });
  expect_error("format 2");
  for (const char* key : {"format", "model", "units", "layout", "progress", "files"}) {
    edit_manifest([&](nlohmann::json& manifest) { manifest.erase(key); });
    expect_error(key);
  }
  edit_manifest([](nlohmann::json& manifest) { manifest["files"].erase(1); });
  expect_error("1 shards for 2 ranks");
  edit_manifest([](nlohmann::json& manifest) { manifest["layout"]["kind"] = "striped"; });
  expect_error("striped");
  edit_manifest(
      [](nlohmann::json& manifest) { manifest["files"][0]["name"] = "../../etc/passwd"; });
  expect_error("../../etc/passwd");
  EXPECT_EQ(load_error(), "");
}

TEST_F(Checkpoint, AnotherModelIsRefusedByItsFirstDifference) {
  save(1);
  const auto refused = [&](const ModelConfig& model, const std::vector<UnitSpec>& units) {
    return error([&] { load_checkpoint(folder_, model, units, {}); });
  };
  ModelConfig model = toy_config();
  model.width = 32;
  std::string message = refused(model, toy_units());
  EXPECT_NE(message.find("model.width is 24 in the checkpoint and 32 in this run"),
            std::string::npos)
      << message;

  std::vector<UnitSpec> units = toy_units();
  units[2].parameters[1].shape = {6, 4};
  message = refused(toy_config(), units);
  EXPECT_NE(message.find("the shape of blocks.1.weight is [4,6]"), std::string::npos) << message;

  units = toy_units();
  units[0].parameters[1].name = "embedding.positions";
  message = refused(toy_config(), units);
  EXPECT_NE(message.find("embedding.positions"), std::string::npos) << message;

  units = toy_units();
  units.pop_back();
  message = refused(toy_config(), units);
  EXPECT_NE(message.find("number of units"), std::string::npos) << message;

  model = toy_config();
  model.init_std = 0.5;
  EXPECT_EQ(refused(model, toy_units()), "") << "how weights were drawn does not matter";
}

// In a mount namespace of its own, so that nothing stays mounted whatever happens.
TEST(CheckpointDisk, FullDiskIsReportedAndNothingStays) {
  const TempDir temp("full_disk");
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    const std::string uid = std::to_string(getuid());
    const std::string gid = std::to_string(getgid());
    if (unshare(CLONE_NEWNS | CLONE_NEWUSER) != 0) _exit(77);
    std::ofstream("/proc/self/setgroups") << "deny";
    std::ofstream("/proc/self/uid_map") << "0 " + uid + " 1";
    std::ofstream("/proc/self/gid_map") << "0 " + gid + " 1";
    if (mount("tmpfs", temp.path().c_str(), "tmpfs", 0, "size=8k") != 0) _exit(77);
    const std::string folder = temp.path() + "/step-00000001";
    try {
      const UnitSpec unit{"big", {{"big.weight", {10'000}, Init::kZeros, 0.0, true}}};
      const Tensor values = Tensor::zeros({10'000}, DType::kFloat32);
      save_shard(folder, 0, 1, {unit}, {{0, {0, 10'000}, values, values, values}});
      dprintf(ends[1], "it was saved");
    } catch (const IoError& e) {
      const bool left = std::filesystem::exists(folder + "/shard-00000-of-00001.safetensors");
      dprintf(ends[1], "%s%s", e.what(), left ? " LEFT BEHIND" : "");
    }
    _exit(0);
  }
  close(ends[1]);
  std::string message;
  char buffer[1024];
  for (ssize_t got; (got = read(ends[0], buffer, sizeof(buffer))) > 0;) message.append(buffer, got);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) {
    GTEST_SKIP() << "no user namespaces here: a small tmpfs cannot be mounted";
  }
  EXPECT_NE(message.find(temp.path()), std::string::npos) << message;
  EXPECT_NE(message.find("No space left on device"), std::string::npos) << message;
  EXPECT_NE(message.find("it needs 120"), std::string::npos) << message;
  EXPECT_EQ(message.find("LEFT BEHIND"), std::string::npos) << message;
}

}  // namespace
}  // namespace muster
