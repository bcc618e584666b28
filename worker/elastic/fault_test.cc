// Processes that are killed while state is on its way: the others say so within a moment, the first
// of them who it was, and what they hold is whole.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "worker/comm/process_testing.h"
#include "worker/comm/testing.h"
#include "worker/elastic/handover.h"
#include "worker/elastic/mirror.h"
#include "worker/elastic/testing.h"

namespace muster {
namespace {

using testing::fill_state;
using testing::keep_filled;
using testing::SpeakingProcess;
using testing::wrong_elements;

constexpr int kWorld = 3;
constexpr int kKilled = 1;

std::shared_ptr<GlooMesh> connect(int rank, const std::string& folder) {
  testing::FolderStore store(folder);
  CommunicatorOptions options;
  options.rank = rank;
  options.world_size = kWorld;
  options.timeout_s = 30.0;
  return std::make_shared<GlooMesh>(options, store);
}

// Every piece that the vault shows is right, element by element. Says which there are.
std::string describe_pieces(const Vault& vault) {
  std::string text;
  for (const PieceId& id : vault.pieces()) {
    const auto piece = vault.find(id);
    if (wrong_elements(piece->state(), id.step) > 0 || piece->progress.updates != id.step) {
      throw Error("a wrong piece: " + id.to_string());
    }
    text += std::to_string(id.part) + "@" + std::to_string(id.step) + " ";
  }
  return text;
}

// The ranks that an error names: "mirror: lost ranks 1, 2 (...".
std::set<int> lost_ranks(const std::string& error) {
  std::set<int> ranks;
  const std::string before = "lost rank";
  const auto begin = error.find(before);
  if (begin == std::string::npos) return ranks;
  const auto first = error.find(' ', begin + before.size());  // behind "rank" or "ranks"
  std::istringstream list(
      error.substr(first, error.find_first_not_of("0123456789, ", first) - first));
  for (std::string rank; std::getline(list, rank, ',');) ranks.insert(std::stoi(rank));
  return ranks;
}

// Starts the ranks, waits until all of them are in the middle of it, kills one, and checks how the
// operation ended for the survivors: the first to notice has nobody else to name than the one that
// was killed, and leaves. The other may be told of that leave before the kernel has closed the last
// connection of the dead. Hands on what the survivors hold.
void kill_one(const std::function<void(int rank, const std::string& folder, int say)>& body,
              const std::function<void(int rank, const std::string& pieces)>& check) {
  const TempDir folder("elastic_faults");
  std::vector<std::unique_ptr<SpeakingProcess>> ranks;
  ranks.reserve(kWorld);
  for (int rank = 0; rank < kWorld; ++rank) {
    ranks.push_back(
        std::make_unique<SpeakingProcess>([&, rank](int say) { body(rank, folder.path(), say); }));
  }
  for (const auto& rank : ranks) {
    ASSERT_EQ(rank->hear(Deadline::after(std::chrono::seconds(30))), "running");
  }
  ranks[kKilled]->kill(SIGKILL);
  const Deadline deadline = Deadline::after(std::chrono::seconds(5));
  std::set<int> named;
  std::string ends;
  for (int rank = 0; rank < kWorld; ++rank) {
    if (rank == kKilled) continue;
    const std::string end = ranks[rank]->hear(deadline);
    const std::string pieces = ranks[rank]->hear(deadline);
    EXPECT_EQ(ranks[rank]->hear(deadline), "done");
    const std::set<int> lost = lost_ranks(end);
    EXPECT_FALSE(lost.empty()) << rank << ": " << end;
    named.insert(lost.begin(), lost.end());
    ends += std::to_string(rank) + ": " + end + "\n";
    check(rank, pieces);
  }
  EXPECT_TRUE(named.contains(kKilled)) << ends;
}

TEST(ElasticFaults, KilledInMirroringTheVersionBeforeIsWhole) {
  const auto body = [](int rank, const std::string& folder, int say) {
    Vault vault({{1'000'003, 17}, DType::kFloat32});
    const std::vector<std::string> nodes(kWorld, "node");
    const int ward = mirror_ward(nodes, rank);
    Mirror mirror(connect(rank, folder),
                  {.generation = 1,
                   .part = rank,
                   .holder = mirror_holder(nodes, rank),
                   .ward = ward,
                   .ward_part = ward,
                   .timeout_s = 30.0},
                  vault, Stream::cpu());
    const auto state = vault.begin({1, kWorld, rank, 0});
    try {
      for (int64_t step = 1;; ++step) {
        fill_state(state->state(), step);
        mirror.start(step, state->state(), {});
        mirror.finish(Mirror::Until::kSent);
        mirror.keep({.updates = step});
        vault.commit(1, step - 1);
        if (step == 2) write_all(say, "running\n", "pipe");
      }
    } catch (const PeerError& error) {
      write_all(say, std::string(error.what()) + "\n" + describe_pieces(vault) + "\n", "pipe");
    }
  };
  std::map<std::string, int> versions;  // "@step": pieces among the survivors
  kill_one(body, [&](int, const std::string& pieces) {
    std::istringstream words(pieces);
    for (std::string word; words >> word;) {
      const size_t at = word.find('@');
      versions[word.substr(at)] |= 1 << std::stoi(word.substr(0, at));
    }
  });
  // Of one version the two survivors have all three parts.
  EXPECT_TRUE(std::any_of(versions.begin(), versions.end(),
                          [](const auto& version) { return version.second == 0b111; }));
}

TEST(ElasticFaults, KilledInAHandoverTheOldPiecesAreWhole) {
  const auto body = [](int rank, const std::string& folder, int say) {
    Vault vault({{20'000'003, 17}, DType::kFloat32});
    HandoverPlan plan{.generation = 1,
                      .step = 5,
                      .self = rank,
                      .participants = kWorld,
                      .holders = {0, 1},
                      .owners = {2, 0, 1}};
    for (int part = 0; part < 2; ++part) {
      if (plan.holders[part] == rank) keep_filled(vault, {1, 2, part, 5});
    }
    const auto mesh = connect(rank, folder);
    int part = 0;
    while (plan.owners[part] != rank) ++part;
    const auto target = vault.begin({2, kWorld, part, 5});
    write_all(say, "running\n", "pipe");
    try {
      // Again and again, so that it is under way when the signal comes.
      while (true) {
        hand_over({.mesh = mesh, .gpus = nullptr}, plan, vault, target->state(), {},
                  {.window = 1 << 16, .timeout_s = 30.0});
      }
    } catch (const PeerError& error) {
      write_all(say, std::string(error.what()) + "\n" + describe_pieces(vault) + "\n", "pipe");
    }
  };
  kill_one(body,
           [](int rank, const std::string& pieces) { EXPECT_EQ(pieces, rank == 0 ? "0@5 " : ""); });
}

}  // namespace
}  // namespace muster
