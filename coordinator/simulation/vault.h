// The pieces of training state that a simulated worker holds in host memory. Pure.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <tuple>

#include "common/protocol/muster.pb.h"

namespace muster::simulation {

struct PieceKey {
  uint64_t generation = 0;
  int world = 0;
  int part = 0;
  int64_t step = 0;
  auto operator<=>(const PieceKey&) const = default;  // NOLINT(modernize-use-nullptr)
};

class Vault {
 public:
  // A piece is complete once it is here.
  void put(const PieceKey& key, uint64_t history) { pieces_[key] = history; }
  std::optional<uint64_t> find(const PieceKey& key) const {
    const auto found = pieces_.find(key);
    return found == pieces_.end() ? std::nullopt : std::optional(found->second);
  }
  // The state of `step` can be trusted to be whole: drops what is older.
  void commit(uint64_t generation, int64_t step) {
    std::erase_if(pieces_, [&](const auto& piece) {
      return piece.first.generation < generation || piece.first.step < step;
    });
  }
  void clear() { pieces_.clear(); }

  void list(proto::Halted* halted) const {
    for (const auto& [key, history] : pieces_) {
      proto::Piece* piece = halted->add_pieces();
      piece->set_generation(key.generation);
      piece->set_world_size(key.world);
      piece->set_part(key.part);
      piece->set_step(key.step);
    }
  }

 private:
  std::map<PieceKey, uint64_t> pieces_;
};

}  // namespace muster::simulation
