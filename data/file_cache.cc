#include "data/file_cache.h"

#include <algorithm>
#include <utility>

namespace muster {
namespace {

constexpr int64_t kInMemoryShare = 4;  // of the budget, for the largest file in memory
constexpr int64_t kOnDiskShare = 8;    // what a file on disk counts: bounds how many are kept open

}  // namespace

FileCache::FileCache(const TextIndex& index, const Tokenizer& tokenizer, int64_t budget_bytes,
                     std::string spill_dir)
    : index_(index),
      tokenizer_(tokenizer),
      budget_(budget_bytes),
      spill_dir_(std::move(spill_dir)) {}

FileCache::Opened FileCache::get(size_t file) {
  std::promise<Opened> promise;
  {
    std::unique_lock lock(mutex_);
    const auto found = entries_.find(file);
    if (found != entries_.end()) {
      recent_.splice(recent_.begin(), recent_, found->second.place);
      const std::shared_future<Opened> opened = found->second.opened;
      lock.unlock();
      return opened.get();
    }
    const int64_t bytes = index_.files[file].stored_tokens * tokenizer_.token_bytes();
    const int64_t cost = bytes <= budget_ / kInMemoryShare ? bytes : budget_ / kOnDiskShare;
    make_room(cost);
    recent_.push_front(file);
    entries_[file] = {promise.get_future().share(), cost, recent_.begin()};
    bytes_ += cost;
    ++decoded_files_;
  }
  try {
    Opened opened =
        open_token_file(index_.files[file], tokenizer_, budget_ / kInMemoryShare, spill_dir_);
    promise.set_value(opened);
    return opened;
  } catch (...) {
    promise.set_exception(std::current_exception());
    const std::lock_guard lock(mutex_);
    drop(file);
    throw;
  }
}

int64_t FileCache::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

int64_t FileCache::decoded_files() const {
  const std::lock_guard lock(mutex_);
  return decoded_files_;
}

void FileCache::make_room(int64_t cost) {
  while (bytes_ + cost > budget_ && !recent_.empty()) drop(recent_.back());
}

void FileCache::drop(size_t file) {
  const auto found = entries_.find(file);
  if (found == entries_.end()) return;
  bytes_ -= found->second.cost;
  recent_.erase(found->second.place);
  entries_.erase(found);
}

}  // namespace muster
