#include "worker/elastic/mirror.h"

#include <gtest/gtest.h>

#include <set>

#include "common/error.h"
#include "worker/comm/testing.h"
#include "worker/elastic/testing.h"

namespace muster {
namespace {

using testing::fill_state;
using testing::wrong_elements;

std::vector<std::string> nodes_of(const std::vector<int>& sizes) {
  std::vector<std::string> nodes;
  for (size_t node = 0; node < sizes.size(); ++node) {
    nodes.insert(nodes.end(), sizes[node], "node-" + std::to_string(node));
  }
  return nodes;
}

TEST(MirrorHolder, IsOnAnotherNodeWhereThereIsOne) {
  for (const std::vector<int>& sizes :
       {std::vector<int>{1, 1}, {2, 2}, {1, 2}, {2, 1}, {8, 8, 8}, {3, 2, 2}, {1, 1, 1, 1}}) {
    const auto nodes = nodes_of(sizes);
    for (int rank = 0; rank < static_cast<int>(nodes.size()); ++rank) {
      const int holder = mirror_holder(nodes, rank);
      EXPECT_EQ(mirror_ward(nodes, holder), rank);
      EXPECT_NE(holder, rank);
      // Where more than half of the ranks share a node, some of them have no other choice.
      const bool half =
          2 * *std::max_element(sizes.begin(), sizes.end()) <= static_cast<int>(nodes.size());
      if (half) {
        EXPECT_NE(nodes[holder], nodes[rank]) << rank;
      }
    }
  }
}

TEST(MirrorHolder, IsTheNextRankOnASingleNodeAndNobodyForOne) {
  EXPECT_EQ(mirror_holder(nodes_of({3}), 2), 0);
  EXPECT_EQ(mirror_ward(nodes_of({3}), 0), 2);
  EXPECT_EQ(mirror_holder(nodes_of({1}), 0), -1);
  EXPECT_EQ(mirror_ward(nodes_of({1}), 0), -1);
}

// One rank with its state, in a world on one node.
struct Rank {
  explicit Rank(std::shared_ptr<GlooMesh> connections, const StateShape& shape)
      : mesh(std::move(connections)), vault(shape) {
    const std::vector<std::string> nodes(mesh->world_size(), "node");
    options.generation = 3;
    options.part = mesh->rank();
    options.holder = mirror_holder(nodes, mesh->rank());
    options.ward = mirror_ward(nodes, mesh->rank());
    options.ward_part = options.ward;
    options.timeout_s = 20.0;
    own = vault.begin(id(options.part, 0));
    mirror.emplace(mesh, options, vault, Stream::cpu());
  }
  PieceId id(int part, int64_t step) const { return {3, mesh->world_size(), part, step}; }
  void expect_piece(int part, int64_t step) const {
    const auto piece = vault.find(id(part, step));
    ASSERT_NE(piece, nullptr) << id(part, step).to_string();
    EXPECT_EQ(wrong_elements(piece->state(), step), 0);
    EXPECT_EQ(piece->progress.updates, step);
  }

  std::shared_ptr<GlooMesh> mesh;
  Vault vault;
  MirrorOptions options;
  std::shared_ptr<StatePiece> own;  // stands for the trainer's state
  std::optional<Mirror> mirror;
};

auto make_mesh() {
  return [](const CommunicatorOptions& options, Store& store) {
    return std::make_shared<GlooMesh>(options, store);
  };
}

// run_ranks_of hands out a reference; the mirror shares it for less long than that.
std::shared_ptr<GlooMesh> borrowed(GlooMesh& mesh) {
  return {&mesh, [](GlooMesh*) {}};
}

TEST(Mirror, EveryRankHasItsOwnPieceAndItsWards) {
  for (const int world : {2, 3}) {
    for (const DType moments : {DType::kFloat32, DType::kBFloat16}) {
      // The first unit makes several chunks; the last has less elements than there are ranks.
      const StateShape shape{{1'500'001, 17, 1}, moments};
      testing::run_ranks_of(world, make_mesh(), [&](GlooMesh& mesh) {
        Rank rank(borrowed(mesh), shape);
        for (const int64_t step : {4, 5}) {
          fill_state(rank.own->state(), step);
          const TrainingProgress progress{.updates = step};
          const bool known = step == 4;
          rank.mirror->start(step, rank.own->state(),
                             known ? std::optional(progress) : std::nullopt);
          rank.mirror->finish(Mirror::Until::kSent);
          EXPECT_EQ(rank.vault.find(rank.id(rank.options.part, step)) != nullptr, known);
          rank.mirror->keep(progress);
          rank.expect_piece(rank.options.part, step);
          rank.expect_piece(rank.options.ward_part, step);
          EXPECT_EQ(rank.mirror->mirrored(), step);
          rank.vault.commit(3, step);
          EXPECT_EQ(rank.vault.pieces().size(), 2u);
        }
      });
    }
  }
}

// Nothing of a mirror that breaks off is shown; what was complete before stays.
TEST(Mirror, LosingAPeerLeavesTheVersionBefore) {
  const StateShape shape{{200'003}, DType::kFloat32};
  const auto body = [&](GlooMesh& mesh) {
    Rank rank(borrowed(mesh), shape);
    fill_state(rank.own->state(), 4);
    rank.mirror->start(4, rank.own->state(), {});
    rank.mirror->finish(Mirror::Until::kSent);
    rank.mirror->keep({.updates = 4});
    if (mesh.rank() == 1) {
      mesh.abort("killed");
      return;
    }
    fill_state(rank.own->state(), 5);
    rank.mirror->start(5, rank.own->state(), {});
    EXPECT_THROW(rank.mirror->finish(Mirror::Until::kSent), PeerError);
    EXPECT_THROW(rank.mirror->check(), PeerError);
    EXPECT_EQ(rank.mirror->mirrored(), 4);
    rank.mirror.reset();
    EXPECT_EQ(rank.vault.pieces().size(), 2u);
    rank.expect_piece(rank.options.part, 4);
    rank.expect_piece(rank.options.ward_part, 4);
  };
  testing::run_ranks_of(3, make_mesh(), body);
}

// Rank 0 goes on with its own copy while rank 1 takes no part yet.
TEST(Mirror, IsSentBehindTheStepsThatFollow) {
  const StateShape shape{{1'500'001}, DType::kFloat32};
  std::atomic<bool> ahead{false};
  testing::run_ranks_of(2, make_mesh(), [&](GlooMesh& mesh) {
    Rank rank(borrowed(mesh), shape);
    fill_state(rank.own->state(), 4);
    const Deadline deadline = Deadline::after(std::chrono::seconds(20));
    while (mesh.rank() == 1 && !ahead && !deadline.passed()) std::this_thread::yield();
    rank.mirror->start(4, rank.own->state(), {});
    rank.mirror->finish(Mirror::Until::kCopied);
    if (mesh.rank() == 0) {
      EXPECT_FALSE(rank.mirror->mirrored());
      EXPECT_TRUE(rank.vault.pieces().empty()) << "of which progress is not known";
      rank.mirror->keep({.updates = 4});
      rank.expect_piece(0, 4);
      fill_state(rank.own->state(), 5);  // the update
      rank.mirror->check();
      ahead = true;
    }
    rank.mirror->keep({.updates = 4});
    rank.mirror->finish(Mirror::Until::kSent);
    EXPECT_EQ(rank.mirror->mirrored(), 4);
    rank.expect_piece(rank.options.part, 4);
    rank.expect_piece(rank.options.ward_part, 4);
  });
}

TEST(Mirror, WhatGoesWrongBehindTheStepsIsSaid) {
  const StateShape shape{{1'500'001}, DType::kFloat32};
  testing::run_ranks_of(2, make_mesh(), [&](GlooMesh& mesh) {
    if (mesh.rank() == 1) return mesh.abort("killed");
    Rank rank(borrowed(mesh), shape);
    rank.mirror->start(4, rank.own->state(), {});
    const Deadline deadline = Deadline::after(std::chrono::seconds(20));
    EXPECT_THROW(
        while (!deadline.passed()) {
          rank.mirror->check();
          std::this_thread::yield();
        },
        PeerError);
    EXPECT_THROW(rank.mirror->start(5, rank.own->state(), {}), PeerError);
  });
}

TEST(Mirror, IsClosedWhileItWaits) {
  const StateShape shape{{1000}, DType::kFloat32};
  std::atomic<bool> closed{false};
  testing::run_ranks_of(2, make_mesh(), [&](GlooMesh& mesh) {
    if (mesh.rank() == 1) {  // takes no part
      EXPECT_THROW(
          {
            while (!closed) std::this_thread::yield();
            Exchange exchange(mesh, "test");
            char byte = 0;
            exchange.receive(0, &byte, 1);
            exchange.start();
            exchange.finish(Deadline::after(std::chrono::seconds(20)));
          },
          PeerError);
      return;
    }
    {
      Rank rank(borrowed(mesh), shape);
      rank.mirror->start(1, rank.own->state(), {});
    }
    closed = true;
  });
}

}  // namespace
}  // namespace muster
