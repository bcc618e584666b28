// The documents of one text file, in order.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "data/text/format.h"

namespace muster {

// Receives a file's documents piece by piece, so that no document has to fit in memory. Pieces are
// not empty; a document has at least one.
class DocumentSink {
 public:
  virtual ~DocumentSink() = default;
  virtual void piece(std::string_view text) = 0;
  virtual void end_document() = 0;
};

struct ReadReport {
  int64_t bad_lines = 0;  // of a .jsonl: not JSON, no text, or longer than 64 MiB; left out
  std::string first_bad;  // "line 7: no \"text\""; empty when there is none
};

// A plain text file is one document (none when it is empty); a .jsonl is one a line, blank lines
// apart. Bytes are passed on as they are, UTF-8 or not. Throws IoError and DataError as ByteStream
// does; pieces handed over before that are void.
ReadReport read_documents(const std::string& path, TextFormat format, DocumentSink& sink);

}  // namespace muster
