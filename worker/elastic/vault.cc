#include "worker/elastic/vault.h"

#include <algorithm>
#include <utility>

#include "kernels/runtime/runtime.h"

namespace muster {
namespace {

// One version of the own piece and of the ward's; another one of each is in use meanwhile.
constexpr size_t kMostIdle = 2;

}  // namespace

Vault::Vault(StateShape shape) : shape_(std::move(shape)), idle_(std::make_shared<Idle>()) {}

std::shared_ptr<StatePiece> Vault::begin(const PieceId& id) {
  const auto needed = static_cast<int64_t>(shape_.bytes(id.world_size, id.part));
  Tensor memory;
  {
    const std::lock_guard lock(idle_->mutex);
    auto& buffers = idle_->buffers;
    const auto found = std::find_if(buffers.begin(), buffers.end(),
                                    [&](const Tensor& buffer) { return buffer.numel() >= needed; });
    if (found != buffers.end()) {
      memory = *found;
      buffers.erase(found);
    } else {
      buffers.clear();  // of a layout of more parts: all of them are too small from now on
    }
  }
  if (!memory.defined()) {
    // As for part 0, the largest, so that the buffer fits every part of this layout.
    const auto bytes = static_cast<int64_t>(shape_.bytes(id.world_size, 0));
    memory = Tensor({std::max<int64_t>(bytes, 1)}, DType::kUInt8, pinned_allocator());
  }
  const auto give_back = [idle = idle_](StatePiece* piece) {
    const std::unique_ptr<StatePiece> owned(piece);
    const std::lock_guard lock(idle->mutex);
    if (idle->buffers.size() < kMostIdle) idle->buffers.push_back(piece->memory());
  };
  return {new StatePiece(shape_, id, std::move(memory)), give_back};
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
