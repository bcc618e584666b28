#include "coordinator/run_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <optional>
#include <thread>

#include "common/error.h"

namespace muster {
namespace {

using testing::HasSubstr;

class RunFilesTest : public testing::Test {
 protected:
  TempDir dir_;
  RunDir run_{dir_.path() + "/nested/run"};
};

TEST_F(RunFilesTest, ASecondCoordinatorIsRefusedAndToldWhereTheFirstIs) {
  std::optional<RunLock> lock(run_);
  EndpointFile endpoint(run_, "tcp://127.0.0.1:4242");
  try {
    RunLock second(run_);
    FAIL();
  } catch (const PeerError& e) {
    EXPECT_THAT(e.what(), HasSubstr("tcp://127.0.0.1:4242"));
    EXPECT_THAT(e.what(), HasSubstr(run_.root));
  }
  lock.reset();
  RunLock third(run_);
}

TEST_F(RunFilesTest, OneThatIsJustEndingIsWaitedFor) {
  std::optional<RunLock> first(run_);
  std::thread end([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    first.reset();
  });
  EXPECT_NO_THROW(RunLock{run_});
  end.join();
}

TEST_F(RunFilesTest, ADirectoryThatIsRemovedOrReplacedIsNoticed) {
  const RunLock lock(run_);
  EXPECT_TRUE(lock.in_place());
  std::filesystem::rename(run_.root, run_.root + "-moved");
  EXPECT_FALSE(lock.in_place());
  const RunLock other(run_);  // in a new directory of the name
  EXPECT_TRUE(other.in_place());
  EXPECT_FALSE(lock.in_place());
  std::filesystem::remove_all(run_.root);
  EXPECT_FALSE(other.in_place());
}

TEST_F(RunFilesTest, AKilledCoordinatorLeavesNoLock) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    RunLock lock(run_);
    [[maybe_unused]] ssize_t ignored = write(ready[1], "x", 1);
    pause();
    _exit(0);
  }
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  EXPECT_THROW(RunLock{run_}, PeerError);
  kill(child, SIGKILL);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  RunLock lock(run_);
  close(ready[0]);
  close(ready[1]);
}

TEST_F(RunFilesTest, TheTokenIsNewWithEachCoordinator) {
  const RunLock lock(run_);
  std::string first;
  {
    const TokenFile file(run_);
    first = file.token();
    EXPECT_EQ(read_file(run_.token()), first);
  }
  EXPECT_FALSE(std::filesystem::exists(run_.token()));
  EXPECT_NE(TokenFile(run_).token(), first);
}

TEST_F(RunFilesTest, TheEndpointFileLivesWithItsOwner) {
  RunLock lock(run_);
  {
    EndpointFile endpoint(run_, "tcp://127.0.0.1:1");
    EXPECT_EQ(read_file(run_.endpoint()), "tcp://127.0.0.1:1\n");
  }
  EXPECT_FALSE(std::filesystem::exists(run_.endpoint()));
}

TEST_F(RunFilesTest, AKeyIsMadeWhereOthersCanReachUs) {
  make_dirs(run_.root);
  EXPECT_FALSE(run_security(run_, "tcp://127.0.0.1:0", {}).enabled());
  EXPECT_FALSE(std::filesystem::exists(run_.run_key()));

  const Security made = run_security(run_, "tcp://*:0", {});
  EXPECT_EQ(made.run_key.size(), 40u);
  struct stat info {};
  ASSERT_EQ(stat(run_.run_key().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_EQ(run_security(run_, "tcp://*:0", {}).run_key, made.run_key) << "the next start keeps it";
}

TEST_F(RunFilesTest, AGivenKeyIsKeptForOthers) {
  make_dirs(run_.root);
  const Security given{generate_run_key()};
  EXPECT_EQ(run_security(run_, "tcp://127.0.0.1:0", given).run_key, given.run_key);
  EXPECT_FALSE(std::filesystem::exists(run_.run_key()));
  EXPECT_EQ(run_security(run_, "tcp://*:0", given).run_key, given.run_key);
  EXPECT_EQ(read_run_key(run_.run_key()), given.run_key);
  EXPECT_THROW(run_security(run_, "tcp://*:0", {generate_run_key()}), ConfigError);
}

TEST(ReachableEndpointTest, AWildcardBecomesAnAddress) {
  EXPECT_EQ(reachable_endpoint("tcp://127.0.0.1:5"), "tcp://127.0.0.1:5");
  EXPECT_EQ(reachable_endpoint("ipc://@x"), "ipc://@x");
  const std::string endpoint = reachable_endpoint("tcp://0.0.0.0:5");
  EXPECT_THAT(endpoint, testing::MatchesRegex("tcp://[0-9]+\\.[0-9]+\\.[0-9]+\\.[0-9]+:5"));
  EXPECT_NE(endpoint, "tcp://0.0.0.0:5");
}

}  // namespace
}  // namespace muster
