#include "common/files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "common/error.h"

namespace muster {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& path, const char* what) {
  const int error = errno;
  throw IoError(fmt::format("{}: cannot {}: {}", path, what, std::strerror(error)));
}

Fd open_file(const std::string& path, int flags, const char* what, mode_t mode = 0644) {
  Fd fd(::open(path.c_str(), flags | O_CLOEXEC, mode));
  if (!fd.valid()) fail(path, what);
  return fd;
}

std::string read_from(const std::string& path, size_t tail_bytes) {
  const Fd fd = open_file(path, O_RDONLY, "read");
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) fail(path, "read");
  const auto size = static_cast<size_t>(info.st_size);
  if (S_ISREG(info.st_mode) && size > tail_bytes &&
      ::lseek(fd.get(), static_cast<off_t>(size - tail_bytes), SEEK_SET) < 0) {
    fail(path, "seek");
  }
  // Read until the end, not up to st_size: files under /proc say 0, and a log may grow meanwhile.
  std::string content;
  char buffer[1 << 16];
  while (true) {
    const ssize_t got = ::read(fd.get(), buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(path, "read");
    if (got == 0) return content;
    content.append(buffer, static_cast<size_t>(got));
  }
}

}  // namespace

void Fd::reset(int fd) noexcept {
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

std::string read_file(const std::string& path) {
  return read_from(path, SIZE_MAX);
}

std::string read_file_tail(const std::string& path, size_t bytes) {
  return read_from(path, bytes);
}

void write_all(int fd, std::string_view content, const std::string& path) {
  while (!content.empty()) {
    const ssize_t written = ::write(fd, content.data(), content.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail(path, "write");
    content.remove_prefix(static_cast<size_t>(written));
  }
}

void write_file_atomic(const std::string& path, std::string_view content) {
  // The process id keeps two writers of one path from sharing the file aside.
  const std::string aside = fmt::format("{}.tmp-{}", path, ::getpid());
  try {
    const Fd fd = open_file(aside, O_WRONLY | O_CREAT | O_TRUNC, "write");
    write_all(fd.get(), content, path);
    if (::fsync(fd.get()) != 0) fail(path, "sync");
    if (::rename(aside.c_str(), path.c_str()) != 0) fail(path, "replace");
  } catch (...) {
    ::unlink(aside.c_str());
    throw;
  }
  const std::string folder = fs::path(path).parent_path().string();
  fsync_dir(folder.empty() ? "." : folder);
}

void fsync_dir(const std::string& path) {
  const Fd fd = open_file(path, O_RDONLY | O_DIRECTORY, "open");
  // Some network file systems cannot sync a directory and say EINVAL: their renames need no sync.
  if (::fsync(fd.get()) != 0 && errno != EINVAL) fail(path, "sync");
}

void make_dirs(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) {
    throw IoError(fmt::format("{}: cannot create the directory: {}", path, error.message()));
  }
}

std::string default_cache_dir() {
  const char* xdg = std::getenv("XDG_CACHE_HOME");
  if (xdg != nullptr && *xdg != '\0') return std::string(xdg) + "/muster";
  const char* home = std::getenv("HOME");
  return std::string(home == nullptr ? "/tmp" : home) + "/.cache/muster";
}

TempDir::TempDir(const std::string& prefix, const std::string& base) {
  const char* usual = std::getenv("TMPDIR");
  const std::string elsewhere = usual == nullptr || *usual == '\0' ? "/tmp" : usual;
  path_ = fmt::format("{}/{}-XXXXXX", base.empty() ? elsewhere : base, prefix);
  if (::mkdtemp(path_.data()) == nullptr) fail(path_, "create a temporary directory");
}

TempDir::~TempDir() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

SharedMemory SharedMemory::create(const std::string& name, size_t bytes) {
  const std::string what = "shared memory " + name;
  Fd fd(::memfd_create(name.c_str(), MFD_CLOEXEC));
  if (!fd.valid()) fail(what, "create");
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) fail(what, "size");
  return SharedMemory(std::move(fd), bytes, what);
}

SharedMemory SharedMemory::attach(pid_t pid, int fd, size_t bytes) {
  const std::string path = fmt::format("/proc/{}/fd/{}", pid, fd);
  Fd opened = open_file(path, O_RDWR, "attach to shared memory");
  struct stat info {};
  if (::fstat(opened.get(), &info) != 0) fail(path, "attach to shared memory");
  if (static_cast<size_t>(info.st_size) < bytes) {
    throw IoError(fmt::format("{}: shared memory has {} bytes, {} were announced", path,
                              info.st_size, bytes));
  }
  return SharedMemory(std::move(opened), bytes, path);
}

SharedMemory::SharedMemory(Fd fd, size_t bytes, const std::string& what)
    : fd_(std::move(fd)), size_(bytes) {
  void* memory =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), /*offset=*/0);
  if (memory == MAP_FAILED) fail(what, "map");
  data_ = static_cast<char*>(memory);
}

SharedMemory::~SharedMemory() {
  unmap();
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  if (this != &other) {
    unmap();
    fd_ = std::move(other.fd_);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

void SharedMemory::unmap() noexcept {
  if (data_ != nullptr) ::munmap(data_, size_);
}

}  // namespace muster
