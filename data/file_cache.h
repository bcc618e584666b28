// Decoded files, the least recently used of which make room for new ones.
#pragma once

#include <cstdint>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "data/token_file.h"

namespace muster {

// Holds at most `budget_bytes` of decoded text. A file of more than a quarter of that does not lie
// in memory (see open_token_file), so a file larger than the whole cache works, and the text that
// threads still hold after its eviction is bounded too: a quarter of the budget each. Thread-safe.
class FileCache {
 public:
  FileCache(const TextIndex& index, const Tokenizer& tokenizer, int64_t budget_bytes,
            std::string spill_dir);

  // File `file` of the index; decodes it when it is not there. Of several threads that want the
  // same file one decodes and the others wait for it (it is bounded by the reading of that one
  // file). Throws what open_token_file throws, and tries again at the next call.
  std::shared_ptr<const TokenFile> get(size_t file);

  int64_t bytes() const;
  int64_t decoded_files() const;  // decodings since the start

 private:
  using Opened = std::shared_ptr<const TokenFile>;
  struct Entry {
    std::shared_future<Opened> opened;
    int64_t cost = 0;
    std::list<size_t>::iterator place;
  };

  void make_room(int64_t cost);
  void drop(size_t file);

  const TextIndex& index_;
  const Tokenizer& tokenizer_;
  const int64_t budget_;
  const std::string spill_dir_;
  mutable std::mutex mutex_;  // guards what follows
  std::unordered_map<size_t, Entry> entries_;
  std::list<size_t> recent_;  // most recently used first
  int64_t bytes_ = 0;
  int64_t decoded_files_ = 0;
};

}  // namespace muster
