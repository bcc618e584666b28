#include "data/text/document_indexer.h"

#include "common/error.h"

namespace muster {

uint64_t digest_of(const IndexedDocument* documents, size_t count) {
  std::vector<uint64_t> words;
  words.reserve(2 * count);
  for (size_t i = 0; i < count; ++i) {
    words.push_back(static_cast<uint64_t>(documents[i].tokens));
    words.push_back(documents[i].hash);
  }
  return xxh3(words.data(), words.size() * sizeof(uint64_t));
}

DocumentIndexer::DocumentIndexer(const Tokenizer& tokenizer, Store store, std::stop_token stop)
    : tokenizer_(tokenizer), store_(std::move(store)), stop_(std::move(stop)) {}

void DocumentIndexer::piece(std::string_view text) {
  if (stop_.stop_requested()) throw Error("the scan was stopped");
  hash_.update(text.data(), text.size());
  text_bytes_ += static_cast<int64_t>(text.size());
  if (tokenizer_.is_identity()) {
    keep(text);
  } else {
    document_.append(text);
  }
}

void DocumentIndexer::end_document() {
  if (!tokenizer_.is_identity()) {
    encoded_.clear();
    tokenizer_.encode(document_, encoded_);
    keep(encoded_);
    document_.clear();
  }
  documents_.push_back({begin_, stored_tokens_ - begin_ + 1, hash_.digest()});
  hash_ = Xxh3();
  begin_ = stored_tokens_;
}

void DocumentIndexer::keep(std::string_view stored) {
  stored_tokens_ += static_cast<int64_t>(stored.size()) / tokenizer_.token_bytes();
  if (store_) store_(stored);
}

}  // namespace muster
