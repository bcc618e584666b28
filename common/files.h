// Files whose writes are all or nothing, and memory that processes share without leaving a name
// behind. Every failure is an IoError with the path and errno's text.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

namespace muster {

// Owns a file descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() { reset(); }
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset(int fd = -1) noexcept;

 private:
  int fd_ = -1;
};

// The whole file.
std::string read_file(const std::string& path);
// At most the last `bytes` of it.
std::string read_file_tail(const std::string& path, size_t bytes);
// Replaces the file by `content`: written aside, synced, renamed, its directory synced. After a
// failure or a crash the old content is still there, and no file is left aside after a failure.
void write_file_atomic(const std::string& path, std::string_view content);
// Writes all of `content` to an open file; `path` is for the message.
void write_all(int fd, std::string_view content, const std::string& path);
// Makes renames and new names in a directory last.
void fsync_dir(const std::string& path);
// mkdir -p.
void make_dirs(const std::string& path);
// "~/.cache/muster" or under $XDG_CACHE_HOME; not created.
std::string default_cache_dir();

// A fresh directory under $TMPDIR or /tmp, removed with all it holds at the end.
class TempDir {
 public:
  // Under `base`; empty: $TMPDIR, or /tmp.
  explicit TempDir(const std::string& prefix = "muster", const std::string& base = "");
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Anonymous shared memory (memfd): it ends with the last process that maps it, however that one
// ends, and is not bounded by the size of /dev/shm.
class SharedMemory {
 public:
  SharedMemory() = default;
  // Zero bytes, `bytes` of them; `name` shows in /proc only.
  static SharedMemory create(const std::string& name, size_t bytes);
  // Maps what process `pid` (of the same user) holds as descriptor `fd`. Throws IoError when the
  // process is gone or the memory is smaller than `bytes`.
  static SharedMemory attach(pid_t pid, int fd, size_t bytes);
  ~SharedMemory();
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;

  char* data() const { return data_; }
  size_t size() const { return size_; }
  int fd() const { return fd_.get(); }

 private:
  SharedMemory(Fd fd, size_t bytes, const std::string& what);
  void unmap() noexcept;

  Fd fd_;
  char* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace muster
