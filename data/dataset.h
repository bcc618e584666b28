// The corpus of a run as two numbered sets of samples, and how a micro-batch is made from their
// numbers. Everything that a run can see follows from the files' bytes and relative paths and from
// the options: no clock, no directory order, no thread timing.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "data/client.h"
#include "data/file_cache.h"
#include "data/slot.h"
#include "data/text/text_index.h"
#include "data/token_stream.h"

namespace muster {

struct Config;

struct DatasetOptions {
  std::vector<std::string> sources;
  std::string tokenizer = "bytes";
  double held_out = 0.01;          // share of documents, chosen by the hash of their text
  bool separate_documents = true;  // see pack()
  int64_t sequence_length = 256;
  int64_t global_batch = 1;  // fewer training samples than this are an error
  std::string cache_dir;     // "" = default_cache_dir()
  int64_t cache_bytes = 256 << 20;
  int threads = 1;  // for indexing
};
// `threads` of [data], or, where that is 0, as many as this process may run at once (at most 16).
DatasetOptions dataset_options(const Config& config);

class Dataset {
 public:
  // Scans and indexes. Throws DataError when the sources are missing or empty, or hold fewer
  // training samples than one global batch; Error when stopped.
  explicit Dataset(const DatasetOptions& options, std::stop_token stop = {});

  // Sixteen hex digits. Equal where paths below the sources, texts, tokenizer and the options that
  // shape samples are equal.
  const std::string& fingerprint() const { return fingerprint_; }
  int64_t samples(Split split) const;
  int64_t tokens() const;  // of both splits
  int32_t vocab_size() const { return tokenizer_->vocab_size(); }
  const TextIndex& index() const { return index_; }
  const FileCache& cache() const { return cache_; }
  const DatasetOptions& options() const { return options_; }

  // Writes samples `ids` and, last, the header with `tag` into a slot. Thread-safe.
  //
  // With separate_documents, each run of tokens of one document inside a sample is a segment:
  // cu_seqlens gets its bounds, positions count from 0 in it, and the target of its end-of-document
  // token is kIgnoredTarget. A document that an earlier sample began goes on from position 0.
  // Without, each sample is one segment and every target counts.
  //
  // Throws DataError for an id outside the split or a file that has changed, IoError.
  void pack(Split split, std::span<const int64_t> ids, uint64_t tag, const SlotLayout& layout,
            char* slot);

 private:
  const TokenStream& stream(Split split) const {
    return split == Split::kTrain ? train_ : held_out_;
  }
  void read_tokens(const TokenStream& stream, int64_t first, int64_t count, int32_t* out);

  const DatasetOptions options_;
  const std::unique_ptr<Tokenizer> tokenizer_;
  const TextIndex index_;
  std::vector<uint32_t> file_of_;  // of each document
  TokenStream train_;
  TokenStream held_out_;
  std::string fingerprint_;
  FileCache cache_;
};

}  // namespace muster
