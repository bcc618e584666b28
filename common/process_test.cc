#include "common/process.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <sstream>

#include "common/error.h"

namespace muster {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr std::chrono::seconds kPatience(10);

ChildOptions shell(const std::string& script, const std::string& output_path = "") {
  return {.name = "test child",
          .argv = {"/bin/sh", "-c", script},
          .environment = {},
          .output_path = output_path};
}

// Reads from a pipe until `end`; the pipe's writer tells that a process has got somewhere.
std::string read_until(int fd, char end) {
  std::string text;
  const Deadline deadline = Deadline::after(kPatience);
  while (text.empty() || text.back() != end) {
    pollfd ready{.fd = fd, .events = POLLIN, .revents = 0};
    char letter = 0;
    if (::poll(&ready, 1, static_cast<int>(deadline.left().count())) != 1) break;
    if (::read(fd, &letter, 1) != 1) break;
    text += letter;
  }
  return text;
}

struct Fifo {
  Fifo() : path(dir.path() + "/fifo") {
    EXPECT_EQ(::mkfifo(path.c_str(), 0600), 0);
    fd = Fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  }
  TempDir dir;
  std::string path;
  Fd fd;
};

TEST(ProcessTest, TellsHowAChildEnded) {
  EXPECT_EQ(Child::spawn(shell("exit 0")).wait(Deadline::after(kPatience))->to_string(),
            "exited with status 0");
  const auto failed = Child::spawn(shell("exit 3")).wait(Deadline::after(kPatience));
  EXPECT_FALSE(failed->ok());
  EXPECT_EQ(failed->to_string(), "exited with status 3");
  const auto killed = Child::spawn(shell("kill -KILL $$")).wait(Deadline::after(kPatience));
  EXPECT_FALSE(killed->ok());
  EXPECT_EQ(killed->to_string(), "was killed by SIGKILL (9)");
  EXPECT_EQ(signal_name(SIGSEGV), "SIGSEGV (11)");
}

TEST(ProcessTest, WaitGivesUpAtItsDeadline) {
  Child child = Child::spawn(shell("exec sleep 1000"));
  EXPECT_FALSE(child.try_wait());
  EXPECT_FALSE(child.wait(Deadline::after(std::chrono::milliseconds(20))));
  EXPECT_EQ(child.kill().to_string(), "was killed by SIGKILL (9)");
  EXPECT_EQ(child.try_wait()->code, SIGKILL);  // repeats
}

TEST(ProcessTest, AppendsOutputToItsLog) {
  const TempDir dir;
  const std::string log = dir.path() + "/log";
  for (const char* script : {"echo out", "echo err >&2"}) {
    EXPECT_TRUE(Child::spawn(shell(script, log)).wait(Deadline::after(kPatience))->ok());
  }
  EXPECT_EQ(read_file(log), "out\nerr\n");
  EXPECT_EQ(read_file_tail(log, 4), "err\n");
}

TEST(ProcessTest, AddsToTheEnvironment) {
  const TempDir dir;
  const std::string log = dir.path() + "/log";
  ::setenv("MUSTER_TEST_KEPT", "kept", 1);
  ::setenv("MUSTER_TEST_CHANGED", "old", 1);
  ChildOptions options =
      shell("echo $MUSTER_TEST_KEPT $MUSTER_TEST_CHANGED $MUSTER_TEST_ADDED", log);
  options.environment = {{"MUSTER_TEST_CHANGED", "new"}, {"MUSTER_TEST_ADDED", "added"}};
  EXPECT_TRUE(Child::spawn(options).wait(Deadline::after(kPatience))->ok());
  EXPECT_EQ(read_file(log), "kept new added\n");
}

TEST(ProcessTest, InheritsNoDescriptor) {
  const TempDir dir;
  const std::string log = dir.path() + "/log";
  const Fd leaky(::open("/dev/zero", O_RDONLY));  // no O_CLOEXEC, as libraries do
  EXPECT_TRUE(Child::spawn(shell("for f in /proc/$$/fd/*; do readlink $f; done; true", log))
                  .wait(Deadline::after(kPatience))
                  ->ok());
  std::istringstream lines(read_file(log));
  std::vector<std::string> open_files;
  for (std::string line; std::getline(lines, line);) open_files.push_back(line);
  EXPECT_THAT(open_files, ElementsAre("/dev/null", log, log));
}

TEST(ProcessTest, HasAGroupOfItsOwnAndUnblockedSignals) {
  sigset_t blocked, former;
  ::sigemptyset(&blocked);
  ::sigaddset(&blocked, SIGTERM);
  ::pthread_sigmask(SIG_BLOCK, &blocked, &former);
  Child child = Child::spawn(shell("exec sleep 1000"));
  ::pthread_sigmask(SIG_SETMASK, &former, nullptr);
  EXPECT_EQ(::getpgid(child.pid()), child.pid());
  EXPECT_EQ(child.terminate(kPatience).to_string(), "was killed by SIGTERM (15)");
}

TEST(ProcessTest, TerminateKillsWhatIgnoresSigterm) {
  Fifo fifo;
  Child child = Child::spawn(
      shell("trap '' TERM; echo ready > " + fifo.path + "; while true; do sleep 1000; done"));
  EXPECT_EQ(read_until(fifo.fd.get(), '\n'), "ready\n");
  EXPECT_EQ(child.terminate(std::chrono::milliseconds(50)).to_string(),
            "was killed by SIGKILL (9)");
}

TEST(ProcessTest, DestructorKillsTheGroup) {
  Fifo fifo;
  Fd grandchild;
  {
    const Child child =
        Child::spawn(shell("sleep 1000 & echo $! > " + fifo.path + "; exec sleep 1000"));
    grandchild = open_pidfd(std::stoi(read_until(fifo.fd.get(), '\n')));
    ASSERT_TRUE(grandchild.valid());
  }
  pollfd ended{.fd = grandchild.get(), .events = POLLIN, .revents = 0};
  EXPECT_EQ(::poll(&ended, 1, std::chrono::milliseconds(kPatience).count()), 1);
}

TEST(ProcessTest, DiesWithItsParent) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const Fd reader(ends[0]), writer(ends[1]);
  const pid_t parent = ::fork();
  if (parent == 0) {
    const Child child = Child::spawn(shell("exec sleep 1000"));
    write_all(writer.get(), std::to_string(child.pid()) + "\n", "pipe");
    while (true) ::pause();
  }
  const Fd child = open_pidfd(std::stoi(read_until(reader.get(), '\n')));
  ASSERT_TRUE(child.valid());
  ::kill(parent, SIGKILL);
  ASSERT_EQ(::waitpid(parent, nullptr, 0), parent);
  pollfd ended{.fd = child.get(), .events = POLLIN, .revents = 0};
  EXPECT_EQ(::poll(&ended, 1, std::chrono::milliseconds(kPatience).count()), 1);
}

TEST(ProcessTest, NamesWhatCannotRun) {
  ChildOptions options = shell("");
  options.argv = {"/nowhere/muster"};
  try {
    Child::spawn(options);
    FAIL();
  } catch (const IoError& error) {
    EXPECT_STREQ(error.what(),
                 "cannot start test child: /nowhere/muster: No such file or directory");
  }
  EXPECT_THROW(Child::spawn(shell("true", "/nowhere/log")), IoError);
}

TEST(ProcessTest, FindsItsOwnProgram) {
  EXPECT_EQ(::access(own_program().c_str(), X_OK), 0);
  EXPECT_THAT(own_program(), HasSubstr("test"));
}

}  // namespace
}  // namespace muster
