#include "common/arena.h"

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <utility>

namespace muster {
namespace {

constexpr size_t kAlignment = 512;

}  // namespace

struct Arena::State {
  std::mutex mutex;
  std::shared_ptr<void> memory;
  char* base = nullptr;
  size_t bytes = 0;
  std::shared_ptr<Allocator> overflow;
  size_t end = 0;  // everything from here on is untouched or free again
  size_t extent = 0;
  size_t in_use = 0;
  int64_t overflows = 0;
  // Free blocks before `end`, by place and by (size, place).
  std::map<size_t, size_t> by_place;
  std::set<std::pair<size_t, size_t>> by_size;

  void add(size_t place, size_t size) {
    by_place.emplace(place, size);
    by_size.emplace(size, place);
  }
  void remove(std::map<size_t, size_t>::iterator block) {
    by_size.erase({block->second, block->first});
    by_place.erase(block);
  }

  // Place of a block, or `bytes` when there is no room.
  size_t take(size_t size) {
    if (const auto fit = by_size.lower_bound({size, 0}); fit != by_size.end()) {
      const auto [found_size, place] = *fit;
      remove(by_place.find(place));
      if (found_size > size) add(place + size, found_size - size);
      return place;
    }
    if (bytes - end < size) return bytes;
    const size_t place = end;
    end += size;
    extent = std::max(extent, end);
    return place;
  }

  void give_back(size_t place, size_t size) {
    auto next = by_place.lower_bound(place);
    if (next != by_place.end() && place + size == next->first) {
      size += next->second;
      remove(next);
    }
    auto before = by_place.lower_bound(place);
    if (before != by_place.begin()) {
      --before;
      if (before->first + before->second == place) {
        place = before->first;
        size += before->second;
        remove(before);
      }
    }
    if (place + size == end) {
      end = place;
    } else {
      add(place, size);
    }
  }
};

Arena::Arena(Device device, std::shared_ptr<void> memory, size_t bytes,
             std::shared_ptr<Allocator> overflow)
    : device_(device), state_(std::make_shared<State>()) {
  state_->base = static_cast<char*>(memory.get());
  state_->memory = std::move(memory);
  state_->bytes = bytes;
  state_->overflow = std::move(overflow);
}
Arena::~Arena() = default;

std::shared_ptr<Arena> Arena::plan() {
  constexpr uintptr_t kBase = uintptr_t{1} << 40;
  constexpr size_t kBytes = size_t{1} << 46;
  std::shared_ptr<void> nowhere(std::bit_cast<void*>(kBase), [](void*) {});
  return std::make_shared<Arena>(Device::plan(), std::move(nowhere), kBytes);
}

std::shared_ptr<void> Arena::allocate(size_t bytes) {
  const size_t size = (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  const std::lock_guard lock(state_->mutex);
  const size_t place = state_->take(size);
  if (place == state_->bytes) {
    if (!state_->overflow) throw std::bad_alloc();
    ++state_->overflows;
    return state_->overflow->allocate(bytes);
  }
  state_->in_use += size;
  // The range outlives the arena for as long as a block is out.
  return std::shared_ptr<void>(state_->base + place, [state = state_, place, size](void*) {
    const std::lock_guard held(state->mutex);
    state->in_use -= size;
    state->give_back(place, size);
  });
}

size_t Arena::bytes_in_use() const {
  const std::lock_guard lock(state_->mutex);
  return state_->in_use;
}
size_t Arena::extent() const {
  const std::lock_guard lock(state_->mutex);
  return state_->extent;
}
int64_t Arena::overflows() const {
  const std::lock_guard lock(state_->mutex);
  return state_->overflows;
}

}  // namespace muster
