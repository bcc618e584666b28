// What the tests of the data folder share: small corpora on disk, and forked processes.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "common/deadline.h"
#include "common/error.h"
#include "common/files.h"

namespace muster {

inline Deadline soon() {
  return Deadline::after(std::chrono::seconds(20));
}

// The message of the error that `action` throws.
template <typename Expected, typename Action>
std::string error_of(Action action) {
  try {
    action();
  } catch (const Expected& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another kind of error: " << error.what();
    return "";
  }
  ADD_FAILURE() << "no error";
  return "";
}

inline std::string gzipped(const std::string& text) {
  z_stream z{};
  EXPECT_EQ(deflateInit2(&z, 6, Z_DEFLATED, MAX_WBITS + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
  std::string out(deflateBound(&z, text.size()) + 64, '\0');
  z.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  z.avail_in = static_cast<uInt>(text.size());
  z.next_out = reinterpret_cast<Bytef*>(out.data());
  z.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(deflate(&z, Z_FINISH), Z_STREAM_END);
  out.resize(z.total_out);
  deflateEnd(&z);
  return out;
}

inline std::string zstd_compressed(const std::string& text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 3));
  return out;
}

// Text that compresses like text does and differs from seed to seed.
inline std::string some_text(size_t bytes, uint32_t seed) {
  std::string text;
  uint32_t state = seed * 2654435761u + 1;
  while (text.size() < bytes) {
    state = state * 1664525u + 1013904223u;
    text += "word" + std::to_string(state >> 22) + ((state >> 12) % 9 == 0 ? ".\n" : " ");
  }
  text.resize(bytes);
  return text;
}

// A folder of test files, removed at the end.
class Corpus {
 public:
  Corpus() { std::filesystem::permissions(path(), std::filesystem::perms::all); }
  std::string path(const std::string& name = "") const {
    return name.empty() ? dir_.path() : dir_.path() + "/" + name;
  }
  void add(const std::string& name, const std::string& bytes) const {
    std::filesystem::create_directories(std::filesystem::path(path(name)).parent_path());
    std::ofstream(path(name), std::ios::binary) << bytes;
  }

 private:
  TempDir dir_{"muster-data-test"};
};

// A forked process that runs `body` and exits with its result; killed, if need be, with this
// object. Fork before this process starts threads or sockets.
class ForkedProcess {
 public:
  explicit ForkedProcess(const std::function<int()>& body) {
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(9);
    int code = 8;
    try {
      code = body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "in a forked process: %s\n", error.what());
    }
    ::_exit(code);
  }
  ~ForkedProcess() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  ForkedProcess(const ForkedProcess&) = delete;
  ForkedProcess& operator=(const ForkedProcess&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const { ::kill(pid_, number); }
  // Its wait status; nullopt at the deadline.
  std::optional<int> wait(Deadline deadline) {
    while (true) {
      int status = 0;
      if (::waitpid(pid_, &status, WNOHANG) == pid_) {
        pid_ = -1;
        return status;
      }
      if (deadline.passed()) return std::nullopt;
      ::usleep(2000);
    }
  }

 private:
  pid_t pid_ = -1;
};

// Runs expectations as a user whom file permissions bind, in a process of its own.
inline void expect_as_unprivileged_user(const std::function<void()>& expectations) {
  ForkedProcess process([&] {
    if (::geteuid() == 0 && (::setgid(65534) != 0 || ::setuid(65534) != 0)) return 7;
    expectations();
    return testing::Test::HasFailure() ? 1 : 0;
  });
  const auto status = process.wait(soon());
  ASSERT_TRUE(status && WIFEXITED(*status));
  EXPECT_EQ(WEXITSTATUS(*status), 0) << "see above";
}

// A pipe for a message from one process to another.
class Pipe {
 public:
  Pipe() { EXPECT_EQ(::pipe(ends_), 0); }
  ~Pipe() {
    ::close(ends_[0]);
    ::close(ends_[1]);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  void send(const std::string& line) const { write_all(ends_[1], line + "\n", "pipe"); }
  std::string receive() const {
    std::string line;
    char c;
    while (::read(ends_[0], &c, 1) == 1 && c != '\n') line += c;
    return line;
  }

 private:
  int ends_[2];
};

}  // namespace muster
