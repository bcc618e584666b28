// What the index knows about documents, and the one piece of code that finds it out: both the scan
// and every later decoding of a file run through DocumentIndexer, so they cannot disagree.
#pragma once

#include <cstdint>
#include <functional>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "common/hash.h"
#include "data/text/document_reader.h"
#include "data/text/tokenizer.h"

namespace muster {

struct IndexedDocument {
  int64_t offset = 0;  // of its first token among the stored tokens of its file
  int64_t tokens = 0;  // with the end-of-document token, which is not stored
  uint64_t hash = 0;   // XXH3 of its text
};

// One digest of a file's documents: their lengths and hashes in order.
uint64_t digest_of(const IndexedDocument* documents, size_t count);

class DocumentIndexer : public DocumentSink {
 public:
  // Hands the tokens as stored (see Tokenizer) to `store`, where given, as they come.
  using Store = std::function<void(std::string_view)>;
  explicit DocumentIndexer(const Tokenizer& tokenizer, Store store = {}, std::stop_token stop = {});

  // Throws Error once a stop is requested, so that a scan of a huge file can end early.
  void piece(std::string_view text) override;
  void end_document() override;

  const std::vector<IndexedDocument>& documents() const { return documents_; }
  int64_t stored_tokens() const { return stored_tokens_; }
  int64_t text_bytes() const { return text_bytes_; }

 private:
  void keep(std::string_view stored);

  const Tokenizer& tokenizer_;
  Store store_;
  std::stop_token stop_;
  Xxh3 hash_;
  std::vector<IndexedDocument> documents_;
  std::string document_;  // gathered where the tokenizer needs documents whole
  std::string encoded_;
  int64_t begin_ = 0;  // first stored token of the open document
  int64_t stored_tokens_ = 0;
  int64_t text_bytes_ = 0;
};

}  // namespace muster
