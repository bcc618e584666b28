// The documents of one split as a single stream of tokens, cut into samples.
//
// With T = sequence_length, sample i covers stream tokens [i·T, i·T + T]: T inputs and, one
// further, their T targets. So the last token of a sample's targets is the first input of the next
// sample, no token is trained on twice, and the tail that does not fill a sample (fewer than T
// tokens) is dropped. Samples are found by binary search: no per-sample index exists.
#pragma once

#include <cstdint>
#include <vector>

#include "data/text/document_indexer.h"

namespace muster {

class TokenStream {
 public:
  // Appends document `document` (its number in TextIndex::documents) of `tokens` tokens.
  void append(uint32_t document, int64_t tokens);

  int64_t tokens() const { return begins_.back(); }
  size_t documents() const { return documents_.size(); }
  // How many samples of `sequence_length` inputs the stream holds.
  int64_t samples(int64_t sequence_length) const;

  // Index in this stream of the document that holds stream token `token`.
  size_t find(int64_t token) const;
  // Of the i-th document of this stream: its number, and its first token's place in the stream.
  uint32_t document(size_t i) const { return documents_[i]; }
  int64_t begin(size_t i) const { return begins_[i]; }
  int64_t end(size_t i) const { return begins_[i + 1]; }

 private:
  std::vector<uint32_t> documents_;
  std::vector<int64_t> begins_{0};  // one more than documents: the last is the stream's length
};

}  // namespace muster
