// Text to token ids.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace muster {

// Tokens are stored between decoding and packing as little-endian unsigned integers of
// token_bytes() each, without the end-of-document token that follows every document. Thread-safe.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  // Part of the dataset's fingerprint: equal names give equal ids.
  virtual std::string name() const = 0;
  virtual int32_t vocab_size() const = 0;
  virtual int32_t end_of_document() const = 0;
  virtual int token_bytes() const = 0;
  // Whether a document may be encoded in pieces cut anywhere, and stored tokens are its bytes.
  virtual bool is_identity() const = 0;
  // Appends the stored tokens of `text`: a document, or a piece of one where is_identity().
  virtual void encode(std::string_view text, std::string& stored) const = 0;
  // The bytes that a token stands for; none for end_of_document() and ids past the vocabulary.
  virtual std::string decode(int32_t token) const = 0;
};

// "bytes": ids 0 to 255 are the bytes, 256 ends a document. Throws ConfigError for any other name.
std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name);

}  // namespace muster
