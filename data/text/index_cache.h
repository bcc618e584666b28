// The index on disk: what was found in each file, kept so that an unchanged file is not read again.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "data/text/document_indexer.h"
#include "data/text/source_scan.h"

namespace muster {

// What one reading of a file found.
struct FileRecord {
  int64_t size = 0;  // these three as they were before it was read
  int64_t mtime_ns = 0;
  uint64_t inode = 0;
  std::string failure;  // not empty: why it cannot be used, and nothing below counts
  int64_t bad_lines = 0;
  std::string first_bad;
  int64_t text_bytes = 0;
  std::vector<IndexedDocument> documents;

  bool matches(const SourceFile& file) const {
    return size == file.size && mtime_ns == file.mtime_ns && inode == file.inode;
  }
};

using FileRecords = std::unordered_map<std::string, FileRecord>;  // by path

// The file in `cache_dir` that holds the index of these sources under this tokenizer.
std::string index_cache_path(const std::string& cache_dir, const std::vector<std::string>& sources,
                             const Tokenizer& tokenizer);

// Empty when there is none, or when it is corrupt or of an older layout (said in one log line).
FileRecords load_index_cache(const std::string& path);
// Writes aside, then renames over: a reader sees the old or the new one, never a part. A cache that
// cannot be written costs the next start time, not this run its life: logged, not thrown.
void save_index_cache(const std::string& path, const FileRecords& records) noexcept;

}  // namespace muster
