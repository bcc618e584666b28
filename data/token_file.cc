#include "data/token_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "common/check.h"
#include "common/error.h"
#include "common/files.h"
#include "data/text/document_reader.h"

namespace muster {
namespace {

template <typename Stored>
void widen(const char* stored, int64_t count, int32_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    Stored token;
    std::memcpy(&token, stored + i * static_cast<int64_t>(sizeof(Stored)), sizeof(Stored));
    out[i] = static_cast<int32_t>(token);
  }
}

void widen(const char* stored, int64_t count, int width, int32_t* out) {
  switch (width) {
    case 1:
      return widen<uint8_t>(stored, count, out);
    case 2:
      return widen<uint16_t>(stored, count, out);
    default:
      MUSTER_CHECK(width == 4, "stored tokens have 1, 2 or 4 bytes");
      return widen<uint32_t>(stored, count, out);
  }
}

[[noreturn]] void changed(const std::string& path) {
  throw DataError(path + " has changed since it was indexed: start the run again");
}

class MemoryTokens : public TokenFile {
 public:
  MemoryTokens(std::string stored, int width) : stored_(std::move(stored)), width_(width) {}
  void read(int64_t first, int64_t count, int32_t* out) const override {
    MUSTER_CHECK(first >= 0 && (first + count) * width_ <= static_cast<int64_t>(stored_.size()));
    widen(stored_.data() + first * width_, count, width_, out);
  }

 private:
  std::string stored_;
  int width_;
};

// Reads with pread and not through a mapping: a file that shrinks is an error, not a SIGBUS.
class DiskTokens : public TokenFile {
 public:
  DiskTokens(Fd fd, std::string path, int width)
      : fd_(std::move(fd)), path_(std::move(path)), width_(width) {}

  void read(int64_t first, int64_t count, int32_t* out) const override {
    std::array<char, 16 << 10> buffer;
    const int64_t at_once = static_cast<int64_t>(buffer.size()) / width_;
    while (count > 0) {
      const int64_t part = std::min(count, at_once);
      read_bytes(first * width_, part * width_, buffer.data());
      widen(buffer.data(), part, width_, out);
      first += part;
      out += part;
      count -= part;
    }
  }

 private:
  void read_bytes(int64_t offset, int64_t bytes, char* out) const {
    while (bytes > 0) {
      const ssize_t got = ::pread(fd_.get(), out, static_cast<size_t>(bytes), offset);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) throw IoError(path_ + " cannot be read: " + std::strerror(errno));
      if (got == 0) changed(path_);
      offset += got;
      out += got;
      bytes -= got;
    }
  }

  Fd fd_;
  std::string path_;
  int width_;
};

// A file that has no name, so that nothing stays behind.
Fd nameless_file(const std::string& dir) {
  make_dirs(dir);
  Fd fd(::open(dir.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (fd.valid()) return fd;
  // A file system without O_TMPFILE: a name for the blink between these two calls.
  std::string name = dir + "/spill-XXXXXX";
  fd.reset(::mkostemp(name.data(), O_CLOEXEC));
  if (!fd.valid()) {
    throw IoError(
        fmt::format("{}: cannot make a file for decoded text: {}", dir, std::strerror(errno)));
  }
  ::unlink(name.c_str());
  return fd;
}

// Runs the file's documents through `store` and makes sure that they are those of the index.
void decode(const IndexedFile& file, const Tokenizer& tokenizer, DocumentIndexer::Store store) {
  DocumentIndexer indexer(tokenizer, std::move(store));
  try {
    read_documents(file.source.path, file.source.format, indexer);
  } catch (const DataError&) {  // it was sound when it was indexed
    changed(file.source.path);
  } catch (const IoError& error) {
    throw IoError(file.source.path + " " + error.what());
  }
  const auto& documents = indexer.documents();
  if (documents.size() != file.documents ||
      digest_of(documents.data(), documents.size()) != file.digest) {
    changed(file.source.path);
  }
}

Fd open_unchanged(const SourceFile& file) {
  // O_NONBLOCK: what was a file when it was indexed may be a FIFO by now.
  Fd fd(::open(file.path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat info;
  if (!fd.valid() || ::fstat(fd.get(), &info) != 0) {
    throw IoError(file.path + " cannot be opened: " + std::strerror(errno));
  }
  if (!S_ISREG(info.st_mode) || info.st_size != file.size ||
      info.st_mtim.tv_sec * int64_t{1000000000} + info.st_mtim.tv_nsec != file.mtime_ns) {
    changed(file.path);
  }
  return fd;
}

}  // namespace

std::unique_ptr<TokenFile> open_token_file(const IndexedFile& file, const Tokenizer& tokenizer,
                                           int64_t memory_limit, const std::string& spill_dir) {
  const int width = tokenizer.token_bytes();
  const int64_t bytes = file.stored_tokens * width;
  if (bytes <= memory_limit) {
    std::string stored;
    stored.reserve(static_cast<size_t>(bytes));
    decode(file, tokenizer, [&](std::string_view part) {
      // A file that has grown must not take more memory than was reserved for it.
      if (static_cast<int64_t>(stored.size() + part.size()) > bytes) changed(file.source.path);
      stored.append(part);
    });
    return std::make_unique<MemoryTokens>(std::move(stored), width);
  }
  const TextFormat& format = file.source.format;
  if (tokenizer.is_identity() && format == TextFormat{}) {
    return std::make_unique<DiskTokens>(open_unchanged(file.source), file.source.path, width);
  }
  Fd spill = nameless_file(spill_dir);
  decode(file, tokenizer, [&](std::string_view part) {
    write_all(spill.get(), part, spill_dir + " (decoded text of " + file.source.path + ")");
  });
  return std::make_unique<DiskTokens>(std::move(spill), file.source.path, width);
}

}  // namespace muster
