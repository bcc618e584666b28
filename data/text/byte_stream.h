// Reads a file as a stream of decompressed bytes. Memory: one buffer, whatever the file's size.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "data/text/format.h"

namespace muster {

class ByteStream {
 public:
  virtual ~ByteStream() = default;
  // Up to `size` bytes (size > 0) into `out`; 0 only at the end. Throws IoError with errno's text,
  // DataError when the compressed stream is truncated or corrupt. Messages do not repeat the path.
  virtual size_t read(char* out, size_t size) = 0;
};

// Opens a regular file. Several gzip members or zstd frames in a row read as one; bytes after the
// last gzip member that begin no other are ignored, as gzip(1) does. Throws IoError.
std::unique_ptr<ByteStream> open_stream(const std::string& path, Compression compression);

}  // namespace muster
