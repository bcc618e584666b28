#include "worker/elastic/vault.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "kernels/runtime/runtime.h"

namespace muster {

Vault::Vault(StateShape shape, Device device) : shape_(std::move(shape)), memory_(device) {}

// As for part 0, the largest, so that a buffer fits every part of the layout.
int64_t Vault::buffer_bytes(int world_size) const {
  return std::max<int64_t>(static_cast<int64_t>(shape_.bytes(world_size, 0)), 1);
}

int64_t Vault::lacking(int world_size) const {
  return memory_.lacking(buffer_bytes(world_size));
}

void Vault::prepare(int world_size, int64_t lacking, std::optional<size_t> available) {
  memory_.prepare({.bytes = buffer_bytes(world_size), .lacking = lacking, .available = available});
}

void Vault::stop_preparing() {
  memory_.stop_preparing();
}

bool Vault::prepared(int world_size) const {
  return memory_.prepared(buffer_bytes(world_size));
}

std::shared_ptr<StatePiece> Vault::begin(const PieceId& id) {
  const auto least = static_cast<int64_t>(shape_.bytes(id.world_size, id.part));
  auto memory = memory_.take(least, buffer_bytes(id.world_size));
  auto* piece = new StatePiece(shape_, id, *memory);
  // The memory goes back after the piece, which has a copy of the tensor.
  return {piece, [memory = std::move(memory)](StatePiece* gone) mutable {
            delete gone;
            memory.reset();
          }};
}

void Vault::keep(std::shared_ptr<StatePiece> piece, const TrainingProgress& progress) {
  piece->progress = progress;
  const std::lock_guard lock(mutex_);
  std::erase_if(pieces_, [&](const auto& held) { return held->id() == piece->id(); });
  pieces_.push_back(std::move(piece));
  std::sort(pieces_.begin(), pieces_.end(),
            [](const auto& a, const auto& b) { return a->id() < b->id(); });
}

void Vault::to_host(const Stream& stream) {
  for (const PieceId& id : pieces()) {
    const auto piece = find(id);
    if (!piece || piece->device().is_cpu()) continue;
    const auto copied = begin(id);
    copy_state(stream, copied->state(), piece->state());
    synchronize(stream);
    keep(copied, piece->progress);
  }
}

void Vault::commit(uint64_t generation, int64_t step) {
  const std::lock_guard lock(mutex_);
  std::erase_if(pieces_, [&](const auto& held) {
    const PieceId& id = held->id();
    return id.generation < generation || (id.generation == generation && id.step < step);
  });
}

std::shared_ptr<const StatePiece> Vault::find(const PieceId& id) const {
  const std::lock_guard lock(mutex_);
  for (const auto& held : pieces_) {
    if (held->id() == id) return held;
  }
  return nullptr;
}

std::vector<PieceId> Vault::pieces() const {
  const std::lock_guard lock(mutex_);
  std::vector<PieceId> ids;
  ids.reserve(pieces_.size());
  for (const auto& held : pieces_) ids.push_back(held->id());
  return ids;
}

}  // namespace muster
