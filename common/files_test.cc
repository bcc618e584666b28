#include "common/files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <functional>

#include "common/error.h"

namespace muster {
namespace {

namespace fs = std::filesystem;
using testing::EndsWith;
using testing::StartsWith;

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const IoError& error) {
    return error.what();
  }
  return "no error";
}

TEST(FilesTest, WritesAndReadsBack) {
  const TempDir dir;
  const std::string path = dir.path() + "/file";
  const std::string content("\0one\n\xff", 6);
  write_file_atomic(path, content);
  EXPECT_EQ(read_file(path), content);
  write_file_atomic(path, "");
  EXPECT_EQ(read_file(path), "");
  EXPECT_EQ(std::distance(fs::directory_iterator(dir.path()), {}), 1);  // nothing left aside
}

TEST(FilesTest, ReadsTails) {
  const TempDir dir;
  const std::string path = dir.path() + "/file";
  write_file_atomic(path, "0123456789");
  EXPECT_EQ(read_file_tail(path, 3), "789");
  EXPECT_EQ(read_file_tail(path, 10), "0123456789");
  EXPECT_EQ(read_file_tail(path, 100), "0123456789");
  EXPECT_FALSE(read_file("/proc/self/status").empty());  // a file that says it has 0 bytes
}

TEST(FilesTest, NamesPathAndReason) {
  const TempDir dir;
  EXPECT_EQ(error_of([&] { read_file(dir.path() + "/none"); }),
            dir.path() + "/none: cannot read: No such file or directory");
  EXPECT_EQ(error_of([&] { read_file(dir.path()); }), dir.path() + ": cannot read: Is a directory");
  EXPECT_THAT(error_of([&] { write_file_atomic(dir.path() + "/none/file", "x"); }),
              EndsWith(": cannot write: No such file or directory"));
  write_file_atomic(dir.path() + "/file", "x");
  EXPECT_THAT(error_of([&] { make_dirs(dir.path() + "/file/sub"); }),
              StartsWith(dir.path() + "/file/sub: cannot create the directory: "));
  EXPECT_THAT(error_of([&] { fsync_dir(dir.path() + "/none"); }), StartsWith(dir.path()));
}

// A full disk, made by a limit on file size in a process of its own.
TEST(FilesTest, KeepsTheOldContentWhenTheDiskIsFull) {
  const TempDir dir;
  const std::string path = dir.path() + "/file";
  write_file_atomic(path, "old");
  const pid_t pid = ::fork();
  if (pid == 0) {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{.rlim_cur = 1000, .rlim_max = 1000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const std::string error = error_of([&] { write_file_atomic(path, std::string(5000, 'x')); });
    ::_exit(error == path + ": cannot write: File too large" ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(read_file(path), "old");
  EXPECT_EQ(std::distance(fs::directory_iterator(dir.path()), {}), 1);
}

TEST(FilesTest, TempDirsAreUniqueAndVanish) {
  std::string path;
  {
    const TempDir one, two;
    EXPECT_NE(one.path(), two.path());
    path = one.path();
    write_file_atomic(path + "/file", "x");
    make_dirs(path + "/a/b/c");
    EXPECT_TRUE(fs::is_directory(path + "/a/b/c"));
  }
  EXPECT_FALSE(fs::exists(path));
}

TEST(FilesTest, SharedMemoryIsSharedByDescriptor) {
  SharedMemory memory = SharedMemory::create("test", 10000);
  EXPECT_EQ(memory.size(), 10000u);
  EXPECT_EQ(std::string(memory.data(), 10000), std::string(10000, '\0'));
  SharedMemory other = SharedMemory::attach(::getpid(), memory.fd(), 10000);
  EXPECT_NE(other.data(), memory.data());
  std::strcpy(other.data(), "hello");
  EXPECT_STREQ(memory.data(), "hello");
  // The mapping outlives its maker.
  memory = SharedMemory();
  EXPECT_EQ(memory.data(), nullptr);
  EXPECT_STREQ(other.data(), "hello");
  const SharedMemory moved = std::move(other);
  EXPECT_STREQ(moved.data(), "hello");
}

TEST(FilesTest, AttachRefusesWhatIsNotThere) {
  const SharedMemory memory = SharedMemory::create("test", 100);
  EXPECT_THAT(error_of([&] { SharedMemory::attach(::getpid(), memory.fd(), 200); }),
              EndsWith("shared memory has 100 bytes, 200 were announced"));
  EXPECT_THAT(error_of([&] { SharedMemory::attach(::getpid(), 12345, 1); }),
              EndsWith("cannot attach to shared memory: No such file or directory"));
}

}  // namespace
}  // namespace muster
