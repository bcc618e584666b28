#include "data/text/byte_stream.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <vector>

#include "common/error.h"
#include "common/files.h"

namespace muster {
namespace {

constexpr size_t kInputBytes = 64 << 10;

class FileStream : public ByteStream {
 public:
  explicit FileStream(const std::string& path) {
    // O_NONBLOCK: opening a FIFO that somebody named notes.txt must not hang.
    fd_.reset(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (!fd_.valid()) throw IoError(std::string("cannot be opened: ") + std::strerror(errno));
    struct stat info;
    if (::fstat(fd_.get(), &info) != 0 || !S_ISREG(info.st_mode)) {
      throw IoError("is not a regular file");
    }
  }

  size_t read(char* out, size_t size) override {
    ssize_t got;
    do {
      got = ::read(fd_.get(), out, size);
    } while (got < 0 && errno == EINTR);
    if (got < 0) throw IoError(std::string("cannot be read: ") + std::strerror(errno));
    return static_cast<size_t>(got);
  }

 private:
  Fd fd_;
};

class GzipStream : public ByteStream {
 public:
  explicit GzipStream(const std::string& path) : file_(path), input_(kInputBytes) {
    // 16: expect the gzip header and check its CRC.
    if (inflateInit2(&z_, MAX_WBITS + 16) != Z_OK) throw std::bad_alloc();
  }
  ~GzipStream() override { inflateEnd(&z_); }

  size_t read(char* out, size_t size) override {
    z_.next_out = reinterpret_cast<Bytef*>(out);
    z_.avail_out = static_cast<uInt>(std::min<size_t>(size, 1 << 30));
    const size_t room = z_.avail_out;
    while (z_.avail_out == room && !ended_) {
      if (z_.avail_in == 0 && !refill()) {
        if (in_member_ || first_member_) throw DataError("is truncated (gzip)");
        ended_ = true;
        break;
      }
      if (!in_member_ && !first_member_ && *z_.next_in != 0x1f) {  // padding after the last member
        ended_ = true;
        break;
      }
      in_member_ = true;
      const int status = inflate(&z_, Z_NO_FLUSH);
      if (status == Z_STREAM_END) {
        in_member_ = first_member_ = false;
        inflateReset(&z_);
      } else if (status != Z_OK && status != Z_BUF_ERROR) {
        throw DataError(std::string("is corrupt (gzip: ") +
                        (z_.msg != nullptr ? z_.msg : "bad data") + ")");
      }
    }
    return room - z_.avail_out;
  }

 private:
  bool refill() {
    const size_t got = file_.read(reinterpret_cast<char*>(input_.data()), input_.size());
    any_input_ |= got > 0;
    z_.next_in = input_.data();
    z_.avail_in = static_cast<uInt>(got);
    // A file of no bytes at all is empty rather than truncated.
    if (got == 0 && !any_input_) first_member_ = false;
    return got > 0;
  }

  FileStream file_;
  std::vector<Bytef> input_;
  z_stream z_{};
  bool in_member_ = false;
  bool first_member_ = true;  // not yet complete
  bool any_input_ = false;
  bool ended_ = false;
};

class ZstdStream : public ByteStream {
 public:
  explicit ZstdStream(const std::string& path)
      : file_(path), storage_(kInputBytes), context_(ZSTD_createDCtx(), ZSTD_freeDCtx) {
    if (context_ == nullptr) throw std::bad_alloc();
  }

  size_t read(char* out, size_t size) override {
    ZSTD_outBuffer output{out, size, 0};
    while (output.pos == 0) {
      if (input_.pos == input_.size && !flushing_) {
        const size_t got = file_.read(storage_.data(), storage_.size());
        if (got == 0) {
          if (in_frame_) throw DataError("is truncated (zstd)");
          return 0;
        }
        input_ = {storage_.data(), got, 0};
      }
      const size_t status = ZSTD_decompressStream(context_.get(), &output, &input_);
      if (ZSTD_isError(status)) {
        throw DataError(std::string("is corrupt (zstd: ") + ZSTD_getErrorName(status) + ")");
      }
      in_frame_ = status != 0;
      // A full output buffer may leave decoded bytes inside the context.
      flushing_ = output.pos == output.size && in_frame_;
    }
    return output.pos;
  }

 private:
  FileStream file_;
  std::vector<char> storage_;
  std::unique_ptr<ZSTD_DCtx, size_t (*)(ZSTD_DCtx*)> context_;
  ZSTD_inBuffer input_{nullptr, 0, 0};
  bool in_frame_ = false;
  bool flushing_ = false;
};

}  // namespace

std::unique_ptr<ByteStream> open_stream(const std::string& path, Compression compression) {
  switch (compression) {
    case Compression::kGzip:
      return std::make_unique<GzipStream>(path);
    case Compression::kZstd:
      return std::make_unique<ZstdStream>(path);
    case Compression::kNone:
      break;
  }
  return std::make_unique<FileStream>(path);
}

}  // namespace muster
