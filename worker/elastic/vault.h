// The pieces of training state that a worker holds, its own and those of the rank that it mirrors.
// It outlives generations: what a change of size or a recovery begins from comes from here.
// Thread-safe.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "worker/elastic/piece_memory.h"
#include "worker/elastic/state_piece.h"

namespace muster {

class Vault {
 public:
  // Of state that lies on `device`.
  explicit Vault(StateShape shape, Device device = Device::cpu());

  const StateShape& shape() const { return shape_; }
  // Bytes that this process lacks for mirrors of this layout.
  int64_t lacking(int world_size) const;
  // Makes the memory that mirrors of this layout take, unless it is there already; on a GPU in the
  // background, else at once. Where what all processes of this host are `lacking` does not fit into
  // what it has left none is made; nullopt: it is tried regardless.
  void prepare(int world_size, int64_t lacking, std::optional<size_t> available);
  // It is there: mirrors, which have two versions at most, need not wait for memory.
  bool prepared(int world_size) const;
  // For a change of size, which should not wait for memory to be made.
  void stop_preparing();
  // A piece to be filled; not in the vault until it is kept. Memory of pieces that are gone is used
  // again.
  std::shared_ptr<StatePiece> begin(const PieceId& id);
  // The piece is complete and as of `progress`. Replaces one of the same id.
  void keep(std::shared_ptr<StatePiece> piece, const TrainingProgress& progress);
  // Moves what lies on a GPU to host memory; it has happened when this returns. `stream` is the
  // GPU's.
  void to_host(const Stream& stream);
  // Nobody will go back behind this: drops what is older, and all of earlier generations.
  void commit(uint64_t generation, int64_t step);
  // Null when it is not held.
  std::shared_ptr<const StatePiece> find(const PieceId& id) const;
  // All that is held, in order.
  std::vector<PieceId> pieces() const;

 private:
  int64_t buffer_bytes(int world_size) const;

  const StateShape shape_;
  PieceMemory memory_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<StatePiece>> pieces_;  // by id
};

}  // namespace muster
