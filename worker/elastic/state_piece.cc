#include "worker/elastic/state_piece.h"

#include <fmt/format.h>

#include <utility>

#include "kernels/runtime/runtime.h"

namespace muster {

std::string PieceId::to_string() const {
  return fmt::format("part {} of {} of generation {} after step {}", part, world_size, generation,
                     step);
}

size_t StateShape::bytes(int world_size, int part) const {
  int64_t elements = 0;
  for (const int64_t numel : units) elements += owned_range(numel, world_size, part).size();
  return static_cast<size_t>(elements) * bytes_per_element();
}

StateShape shape_of(const std::vector<UnitSpec>& units, DType moments) {
  StateShape shape{.units = {}, .moments = moments};
  for (const UnitSpec& unit : units) shape.units.push_back(unit.numel());
  return shape;
}

StatePiece::StatePiece(const StateShape& shape, const PieceId& id, Tensor memory)
    : id_(id), memory_{std::move(memory)} {
  const auto bytes = static_cast<int64_t>(shape.bytes(id.world_size, id.part));
  bytes_ = this->memory().view().slice(0, bytes);
  for (const int64_t numel : shape.units) {
    const Range range = owned_range(numel, id.world_size, id.part);
    state_.push_back({static_cast<int>(state_.size()), range, {}, {}, {}});
  }
  // Kind after kind, so that every view is aligned to its type.
  char* at = static_cast<char*>(bytes_.raw());
  const auto lay = [&](TensorView ShardState::*kind, DType dtype) {
    for (ShardState& one : state_) {
      one.*kind = TensorView(at, dtype, {one.range.size()});
      at += (one.*kind).bytes();
    }
  };
  lay(&ShardState::weight, DType::kFloat32);
  lay(&ShardState::m, shape.moments);
  lay(&ShardState::v, shape.moments);
}

StatePiece::StatePiece(const PieceId& id, std::vector<ShardState> state, std::vector<Tensor> memory)
    : id_(id), memory_(std::move(memory)), state_(std::move(state)) {}

TensorView as_bytes(TensorView view) {
  MUSTER_CHECK(view.contiguous());
  return {view.raw(), DType::kUInt8, {static_cast<int64_t>(view.bytes())}, view.device()};
}

void copy_state(const Stream& stream, const std::vector<ShardState>& to,
                const std::vector<ShardState>& from) {
  MUSTER_CHECK(to.size() == from.size());
  for (size_t i = 0; i < to.size(); ++i) {
    MUSTER_CHECK(to[i].unit == from[i].unit && to[i].range == from[i].range);
    copy(stream, to[i].weight, from[i].weight);
    copy(stream, to[i].m, from[i].m);
    copy(stream, to[i].v, from[i].v);
  }
}

}  // namespace muster
