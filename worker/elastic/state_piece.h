// A part of the training state as it was after one step: what mirrors keep and what a change of
// size moves. In host memory all of it lies in one buffer, so that it travels as bytes; or it is
// the state that a generation has left where it trained.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "common/tensor.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/sharding/sharded_parameters.h"

namespace muster {

// Part `part` of the layout for `world_size` parts, of generation `generation` after step `step`.
struct PieceId {
  uint64_t generation = 0;
  int world_size = 1;
  int part = 0;
  int64_t step = 0;
  auto operator<=>(const PieceId&) const = default;  // NOLINT(modernize-use-nullptr)
  std::string to_string() const;
};

// What the state of a model consists of.
struct StateShape {
  std::vector<int64_t> units;       // elements of each
  DType moments = DType::kFloat32;  // float32 or bfloat16

  // Of a weight and its two moments.
  size_t bytes_per_element() const { return size_of(DType::kFloat32) + 2 * size_of(moments); }
  size_t bytes(int world_size, int part) const;
};
StateShape shape_of(const std::vector<UnitSpec>& units, DType moments);

class StatePiece {
 public:
  // Views into `memory`, [at least shape.bytes()] uint8 on the host, which the piece keeps.
  StatePiece(const StateShape& shape, const PieceId& id, Tensor memory);
  // `state` itself, whose memory the piece keeps: that of a generation that trains no more.
  StatePiece(const PieceId& id, std::vector<ShardState> state, std::vector<Tensor> memory);

  const PieceId& id() const { return id_; }
  // One entry a unit, as of ShardedParameters::state().
  const std::vector<ShardState>& state() const { return state_; }
  Device device() const { return memory_.front().view().device(); }
  // All of it, [n] uint8; undefined where it does not lie in one buffer.
  TensorView bytes() const { return bytes_; }
  const Tensor& memory() const { return memory_.front(); }

  TrainingProgress progress;

 private:
  PieceId id_;
  std::vector<Tensor> memory_;
  TensorView bytes_;
  std::vector<ShardState> state_;
};

// The same bytes as [n] uint8; the view must be contiguous.
TensorView as_bytes(TensorView view);
// Copies weights and moments of each entry; ranges must be equal. As copy() of kernels/runtime.
void copy_state(const Stream& stream, const std::vector<ShardState>& to,
                const std::vector<ShardState>& from);

}  // namespace muster
