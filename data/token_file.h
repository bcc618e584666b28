// The stored tokens of one source file, readable at any place.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "data/text/text_index.h"
#include "data/text/tokenizer.h"

namespace muster {

class TokenFile {
 public:
  virtual ~TokenFile() = default;
  // Stored tokens [first, first + count) as ids into `out`. Thread-safe. Throws IoError; DataError
  // naming the file when it has changed under us.
  virtual void read(int64_t first, int64_t count, int32_t* out) const = 0;
};

// Decodes a file. Up to `memory_limit` bytes of stored tokens lie in memory; above that a plain
// text file is read where it lies and any other is decoded into a file without a name in
// `spill_dir`, which the kernel drops with the last user, however that one ends. Throws IoError;
// DataError naming the file when it is no longer what was indexed.
std::unique_ptr<TokenFile> open_token_file(const IndexedFile& file, const Tokenizer& tokenizer,
                                           int64_t memory_limit, const std::string& spill_dir);

}  // namespace muster
