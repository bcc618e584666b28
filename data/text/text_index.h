// Every document of the corpus: where it lies, how long it is, what it hashes to.
#pragma once

#include <cstdint>
#include <stop_token>
#include <string>
#include <vector>

#include "data/text/document_indexer.h"
#include "data/text/source_scan.h"

namespace muster {

struct IndexedFile {
  SourceFile source;
  size_t first_document = 0;  // in TextIndex::documents
  size_t documents = 0;
  int64_t stored_tokens = 0;
  uint64_t digest = 0;  // digest_of its documents
};

struct TextIndex {
  std::vector<IndexedFile> files;  // those that hold documents, in the order of the scan
  std::vector<IndexedDocument> documents;
  std::vector<SkippedFile> skipped;      // files of which nothing is used
  std::vector<SkippedFile> partly_used;  // files of which bad lines were left out
  int64_t text_bytes = 0;
  size_t files_read = 0;    // decoded now
  size_t files_cached = 0;  // taken from the cache on disk
};

// Scans the sources, decodes what the cache does not know on `threads` threads and updates the
// cache. An unreadable, empty, truncated or corrupt file is skipped. Throws DataError as
// scan_sources does and when no document is left; Error when stopped.
TextIndex build_text_index(const std::vector<std::string>& sources, const Tokenizer& tokenizer,
                           const std::string& cache_dir, int threads, std::stop_token stop = {});

}  // namespace muster
