// Bad input from outside: each is refused, or survived, with a message that names the place.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <unistd.h>
#include <zlib.h>

#include <filesystem>
#include <thread>

#include "common/run_dir.h"
#include "common/transport/transport.h"
#include "tests/e2e/sandbox.h"

namespace muster {
namespace {

using std::chrono::seconds;
namespace fs = std::filesystem;

std::string gzip(const std::string& text, const std::string& scratch) {
  gzFile file = gzopen(scratch.c_str(), "wb");
  gzwrite(file, text.data(), static_cast<unsigned>(text.size()));
  gzclose(file);
  return read_file(scratch);
}

class BadInput : public testing::Test {
 protected:
  // Expects `muster train` with these settings to fail with `exit_code` and a message that holds
  // each of `words`.
  void expect_refused(const std::vector<std::string>& settings, int exit_code,
                      const std::vector<std::string>& words) {
    const auto outcome = sandbox_.run(sandbox_.train_arguments("run", 1, settings));
    EXPECT_FALSE(outcome.status.signalled);
    EXPECT_EQ(outcome.status.code, exit_code) << outcome.output;
    for (const auto& word : words)
      EXPECT_NE(outcome.output.find(word), std::string::npos) << word << " in:\n" << outcome.output;
    EXPECT_TRUE(sandbox_.processes().empty());
  }

  Sandbox sandbox_;
};

TEST_F(BadInput, AnUnknownKeyNamesItsPlaceAndTheNearestKey) {
  write_file_atomic(sandbox_.config(),
                    read_file(sandbox_.config()) + "\n[memory]\nchekpoint = \"block\"\n");
  expect_refused({}, 2, {"tiny.toml:", "memory.chekpoint", "memory.checkpoint"});
}

TEST_F(BadInput, ANumberOfTooManyDigitsIsRefusedWithTheKeysRange) {
  const std::string digits(40, '9');
  expect_refused({"train.steps=" + digits}, 2,
                 {"train.steps: " + digits + " is out of range: 1 to 1e+12 steps"});
}

TEST_F(BadInput, AnImpossibleShapeIsRefused) {
  expect_refused({"model.heads=3", "model.kv_heads=2"}, 2, {"kv_heads", "heads"});
}

TEST_F(BadInput, WhatNoWorkerCouldDoIsRefusedBeforeAnythingStarts) {
  if (!fs::exists("/dev/nvidia0")) expect_refused({"run.device=cuda"}, 2, {"run.device"});
  expect_refused({"model.vocab_size=1"}, 2, {"model.vocab_size"});
  if (std::thread::hardware_concurrency() < 1000) {
    expect_refused({"parallel.threads=4096"}, 2, {"parallel.threads: 4096"});
  }
}

TEST_F(BadInput, AConfigThatIsNoFileIsRefused) {
  const auto outcome = sandbox_.run({"train", sandbox_.corpus()});
  EXPECT_EQ(outcome.status.code, 2);
  EXPECT_NE(outcome.output.find("not a regular file"), std::string::npos) << outcome.output;
}

TEST_F(BadInput, AMissingConfigIsNamed) {
  const auto outcome = sandbox_.run({"train", sandbox_.path("nowhere.toml")});
  EXPECT_FALSE(outcome.status.ok());
  EXPECT_NE(outcome.output.find("nowhere.toml"), std::string::npos) << outcome.output;
}

TEST_F(BadInput, AMissingCorpusIsNamed) {
  expect_refused({"data.sources=[\"" + sandbox_.path("nowhere") + "\"]"}, 1,
                 {sandbox_.path("nowhere")});
}

TEST_F(BadInput, AnEmptyCorpusIsNamed) {
  make_dirs(sandbox_.path("empty"));
  expect_refused({"data.sources=[\"" + sandbox_.path("empty") + "\"]"}, 1,
                 {sandbox_.path("empty")});
}

TEST_F(BadInput, ACorpusSmallerThanABatchSaysWhatToDo) {
  expect_refused({"train.global_batch=100000"}, 1, {"train.global_batch"});
}

TEST_F(BadInput, BadUtf8IsKeptAsBytes) {
  write_file_atomic(sandbox_.corpus() + "/bad.txt", std::string(3000, '\xff'));
  sandbox_.train("run", 1, {"train.steps=5"});
}

TEST_F(BadInput, TruncatedAndUnreadableFilesAreNamedSkippedAndCounted) {
  const std::string whole = gzip(generated_text(99, 20000), sandbox_.path("scratch.gz"));
  write_file_atomic(sandbox_.corpus() + "/whole.txt.gz", whole);
  write_file_atomic(sandbox_.corpus() + "/cut.txt.gz", whole.substr(0, whole.size() / 2));
  fs::create_symlink("nowhere", sandbox_.corpus() + "/dangling.txt");
  write_file_atomic(sandbox_.corpus() + "/lines.jsonl", "{\"text\": \"a good line\"}\nrubbish\n");
  const auto outcome = sandbox_.train("run", 2, {"train.steps=5"});
  std::string events;
  for (const auto& event : sandbox_.events("run")) events += event.dump() + "\n";
  EXPECT_NE(events.find("cut.txt.gz"), std::string::npos) << events;
  EXPECT_NE(events.find("dangling.txt"), std::string::npos) << events;
  EXPECT_EQ(events.find("whole.txt.gz"), std::string::npos) << events;
  EXPECT_NE(outcome.output.find("2 files could not be used and were skipped; of 1 file some lines "
                                "were left out"),
            std::string::npos)
      << outcome.output;
}

TEST_F(BadInput, AFullDiskSpoilsNoCheckpointThatIsThere) {
  const std::string run = sandbox_.path("run");
  make_dirs(run);
  if (mount("tmpfs", run.c_str(), "tmpfs", 0, "size=2600k") != 0)
    GTEST_SKIP() << "cannot mount a small tmpfs here";
  struct Unmount {
    std::string path;
    ~Unmount() { umount2(path.c_str(), MNT_DETACH); }
  } unmount{run};
  // A checkpoint takes about 1 MiB: the first fits, two do not.
  const std::vector<std::string> settings = {"model.width=64", "model.ffn=176",
                                             "checkpoint.every=10", "train.steps=30"};
  const auto outcome = sandbox_.run(sandbox_.train_arguments("run", 2, settings));
  EXPECT_FALSE(outcome.status.ok()) << "the last checkpoint could not be written\n"
                                    << outcome.output;
  EXPECT_NE(outcome.output.find("No space left"), std::string::npos) << outcome.output;
  EXPECT_TRUE(fs::exists(RunDir{run}.checkpoint(10)));
  EXPECT_FALSE(fs::exists(RunDir{run}.checkpoint(30)));
  for (const auto& entry : fs::directory_iterator(RunDir{run}.checkpoints())) {
    EXPECT_EQ(entry.path().filename().string().rfind(".partial", 0), std::string::npos)
        << entry.path();
  }
  const auto text = sandbox_.run({"generate", run, "--prompt", "the", "--tokens", "4"});
  EXPECT_TRUE(text.status.ok()) << text.output;
}

TEST_F(BadInput, APortInUseIsNamed) {
  const int taken = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(taken, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(taken, 1), 0);
  socklen_t size = sizeof(address);
  getsockname(taken, reinterpret_cast<sockaddr*>(&address), &size);
  const std::string endpoint = "tcp://127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  const auto outcome = sandbox_.run({"coordinator", sandbox_.config(), "--listen", endpoint,
                                     "--set", "run.dir=\"" + sandbox_.path("run") + "\""});
  close(taken);
  EXPECT_EQ(outcome.status.code, 1);
  EXPECT_NE(outcome.output.find(endpoint), std::string::npos) << outcome.output;
  EXPECT_NE(outcome.output.find("in use"), std::string::npos) << outcome.output;
}

class Listening : public BadInput {
 protected:
  // A coordinator by itself, listening as a cluster's would: on all addresses, so with a run key.
  Child start_coordinator() {
    Child child = sandbox_.start({"coordinator", sandbox_.config(), "--listen", "tcp://*:0",
                                  "--set", "run.dir=\"" + sandbox_.path("run") + "\"", "--set",
                                  "parallel.workers=1", "--set", "train.steps=20"});
    EXPECT_TRUE(eventually(Deadline::after(seconds(20)),
                           [&] { return fs::exists(RunDir{sandbox_.path("run")}.endpoint()); }));
    const std::string bound = read_file(RunDir{sandbox_.path("run")}.endpoint());
    port_ = std::stoi(bound.substr(bound.rfind(':') + 1));
    return child;
  }
  std::string endpoint() const { return "tcp://127.0.0.1:" + std::to_string(port_); }

  // The honest node still can join and the run comes to its end.
  void expect_the_run_goes_on(Child& coordinator) {
    const auto node = sandbox_.run({"node", "--coordinator", endpoint(), "--workers", "1",
                                    "--run-key", RunDir{sandbox_.path("run")}.run_key()});
    EXPECT_TRUE(node.status.ok()) << node.output;
    const auto outcome = sandbox_.finish(coordinator);
    EXPECT_TRUE(outcome.status.ok()) << outcome.output;
    EXPECT_EQ(sandbox_.losses("run").size(), 20U);
  }

  int port_ = 0;
};

TEST_F(Listening, AWrongRunKeyIsRefusedAndNamed) {
  Child coordinator = start_coordinator();
  const std::string key = sandbox_.path("wrong.key");
  write_file_atomic(key, generate_run_key());
  fs::permissions(key, fs::perms::owner_read | fs::perms::owner_write);
  const auto node =
      sandbox_.run({"node", "--coordinator", endpoint(), "--workers", "1", "--run-key", key}, 40);
  EXPECT_EQ(node.status.code, 1) << node.output;
  EXPECT_NE(node.output.find("run key"), std::string::npos) << node.output;
  expect_the_run_goes_on(coordinator);
}

TEST_F(Listening, ANodeMayBringMoreWorkersThanTheRunWasPlannedFor) {
  Child coordinator = start_coordinator();
  const auto node = sandbox_.run({"node", "--coordinator", endpoint(), "--workers", "3",
                                  "--run-key", RunDir{sandbox_.path("run")}.run_key()});
  EXPECT_TRUE(node.status.ok()) << node.output;
  EXPECT_TRUE(sandbox_.finish(coordinator, 30).status.ok());
}

TEST_F(Listening, ANodeThatDoesNotShareTheRunDirectoryIsRefusedAndTheRunGoesOn) {
  Child coordinator = start_coordinator();
  // As another machine would see it: without the coordinator's token.
  const std::string token = RunDir{sandbox_.path("run")}.token();
  fs::rename(token, token + ".away");
  const auto node = sandbox_.run({"node", "--coordinator", endpoint(), "--workers", "1",
                                  "--run-key", RunDir{sandbox_.path("run")}.run_key()});
  EXPECT_EQ(node.status.code, 1) << node.output;
  EXPECT_NE(node.output.find("does not share the run directory " + sandbox_.path("run")),
            std::string::npos)
      << node.output;
  fs::rename(token + ".away", token);
  expect_the_run_goes_on(coordinator);
}

TEST_F(Listening, GarbageDoesNotDisturbTheCoordinator) {
  Child coordinator = start_coordinator();
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port_));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  for (int i = 0; i < 20; ++i) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    const std::string garbage =
        generated_text(static_cast<uint64_t>(i), 100 * static_cast<size_t>(i));
    (void)!write(fd, garbage.data(), garbage.size());
    close(fd);
  }
  expect_the_run_goes_on(coordinator);
}

}  // namespace
}  // namespace muster
