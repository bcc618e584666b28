#include "data/service.h"

#include <fcntl.h>

#include <future>

#include "data/client.h"
#include "data/service_testing.h"

namespace muster {
namespace {

using testing::HasSubstr;

constexpr int64_t kLength = 16;

class DataServiceTest : public testing::Test {
 protected:
  DataServiceTest() {
    corpus_.add("a.txt", some_text(20'000, 1));
    corpus_.add("b.rst.gz", gzipped(some_text(20'000, 2)));
    config_.data.sources = {corpus_.path()};
    config_.data.cache_dir = cache_.path();
    config_.data.held_out = 0;
    config_.train.sequence_length = kLength;
    config_.train.global_batch = 4;
    config_.elastic.shutdown_timeout_s = 5;
  }
  DataServiceOptions options() const {
    DataServiceOptions options;
    options.coordinator = endpoint_;
    options.security = security_;
    options.member_id = "data-1";
    options.node_id = "node-1";
    options.connect_timeout_s = 20;
    return options;
  }
  DataClientOptions client_options(const std::string& endpoint, const std::string& member) const {
    return {endpoint, member, 3, 4, kLength};
  }
  FakeCoordinator& coordinator(double heartbeat_s = 0.2) {
    if (!coordinator_) {
      coordinator_ = std::make_unique<FakeCoordinator>(config_, security_, heartbeat_s, endpoint_);
      coordinator_->start();
    }
    return *coordinator_;
  }
  // Fork this before the coordinator starts.
  std::unique_ptr<ForkedProcess> fork_service() const {
    return std::make_unique<ForkedProcess>([this] { return run_data_service(options()); });
  }
  static void expect_batch(DataClient& client, int64_t id) {
    client.request(Split::kTrain, std::vector<int64_t>{id});
    const Batch& batch = client.next(soon());
    EXPECT_EQ(batch.ids[0], id);
    client.release(batch);
  }
  static void expect_exit(ForkedProcess& process, int code) {
    const auto status = process.wait(soon());
    ASSERT_TRUE(status.has_value()) << "still running";
    ASSERT_TRUE(WIFEXITED(*status)) << "killed by " << WTERMSIG(*status);
    EXPECT_EQ(WEXITSTATUS(*status), code);
  }
  // Rings that a process holds open, by the names that /proc shows.
  static int rings_of(pid_t pid) {
    int rings = 0;
    const std::string folder = "/proc/" + std::to_string(pid) + "/fd";
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      std::error_code gone;
      const auto target = std::filesystem::read_symlink(entry.path(), gone).string();
      if (target.find("memfd:muster-ring") != std::string::npos) ++rings;
    }
    return rings;
  }

  Corpus corpus_;
  Corpus cache_;
  Config config_;
  Security security_{generate_run_key()};
  const std::string endpoint_ = random_endpoint();
  std::unique_ptr<FakeCoordinator> coordinator_;
};

TEST_F(DataServiceTest, AsAThreadReportsTheDatasetServesAndStops) {
  corpus_.add("c.txt.gz", gzipped(some_text(5000, 3)).substr(0, 700));
  corpus_.add("d.txt", "");
  DataServiceOptions as_thread = options();
  as_thread.handle_signals = false;
  coordinator();
  auto exit_code = std::async(std::launch::async, [&] { return run_data_service(as_thread); });
  const proto::DatasetReport report = coordinator().report();
  EXPECT_EQ(report.error(), "");
  EXPECT_EQ(report.fingerprint().size(), 16u);
  EXPECT_EQ(report.tokens(), 40'002);
  EXPECT_EQ(report.bytes(), 40'000);
  EXPECT_EQ(report.documents(), 2);
  EXPECT_EQ(report.train_samples(), 40'001 / kLength);
  EXPECT_EQ(report.held_out_samples(), 0);
  EXPECT_EQ(report.vocab_size(), 257);
  EXPECT_EQ(report.skipped_count(), 2);
  EXPECT_THAT(std::vector<std::string>(report.skipped().begin(), report.skipped().end()),
              testing::ElementsAre(corpus_.path("c.txt.gz") + ": is truncated (gzip)",
                                   corpus_.path("d.txt") + ": is empty"));
  {
    DataClient client(client_options(report.endpoint(), "w0"), security_, soon());
    for (int64_t id = 0; id < report.train_samples(); id += 97) expect_batch(client, id);
  }
  EXPECT_GE(coordinator().heartbeats(3, soon()), 3);
  coordinator().stop_service(true);
  ASSERT_EQ(exit_code.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  EXPECT_EQ(exit_code.get(), 0);
}

TEST_F(DataServiceTest, FilesWithBadLinesAreCountedApart) {
  corpus_.add("d.txt", "");
  corpus_.add("e.jsonl", "{\"text\": \"kept\"}\nrubbish\n");
  DataServiceOptions as_thread = options();
  as_thread.handle_signals = false;
  coordinator();
  auto exit_code = std::async(std::launch::async, [&] { return run_data_service(as_thread); });
  const proto::DatasetReport report = coordinator().report();
  EXPECT_EQ(report.skipped_count(), 1);
  EXPECT_THAT(report.skipped(), testing::ElementsAre(corpus_.path("d.txt") + ": is empty"));
  EXPECT_EQ(report.partly_used_count(), 1);
  EXPECT_THAT(report.partly_used(),
              testing::ElementsAre(testing::HasSubstr("e.jsonl: 1 bad lines left out; line 2:")));
  coordinator().stop_service(true);
  EXPECT_EQ(exit_code.get(), 0);
}

TEST_F(DataServiceTest, TellsTheCoordinatorThatTheSourcesAreUnusable) {
  config_.data.sources = {corpus_.path("missing")};
  DataServiceOptions as_thread = options();
  as_thread.handle_signals = false;
  coordinator();
  auto exit_code = std::async(std::launch::async, [&] { return run_data_service(as_thread); });
  EXPECT_THAT(coordinator().report().error(), HasSubstr("missing\" cannot be read"));
  coordinator().stop_service(false);
  EXPECT_THAT(error_of<DataError>([&] { exit_code.get(); }), HasSubstr("cannot be read"));
}

TEST_F(DataServiceTest, TellsTheCoordinatorThatTheCorpusIsTooSmall) {
  config_.train.global_batch = 1'000'000;
  DataServiceOptions as_thread = options();
  as_thread.handle_signals = false;
  coordinator();
  auto exit_code = std::async(std::launch::async, [&] { return run_data_service(as_thread); });
  EXPECT_THAT(coordinator().report().error(), HasSubstr("smaller than one step"));
  coordinator().stop_service(false);
  EXPECT_THROW(exit_code.get(), DataError);
}

TEST_F(DataServiceTest, SaysThatNoCoordinatorAnswers) {
  DataServiceOptions hasty = options();
  hasty.connect_timeout_s = 0.1;
  hasty.handle_signals = false;
  EXPECT_THAT(
      error_of<TimeoutError>([&] { run_data_service(hasty); }),
      testing::AllOf(HasSubstr("coordinator at " + endpoint_), HasSubstr("did not answer")));
}

TEST_F(DataServiceTest, AsAProcessServesWorkersAndFreesTheRingOfAKilledOne) {
  const Pipe to_worker;
  const Pipe from_worker;
  const auto service = fork_service();
  ForkedProcess worker([&] {
    DataClient client(client_options(to_worker.receive(), "w0"), security_, soon());
    client.request(Split::kTrain, std::vector<int64_t>{1, 2});
    client.next(soon());
    client.request(Split::kTrain, std::vector<int64_t>{3});
    from_worker.send("has a batch");
    ::pause();
    return 0;
  });
  const std::string endpoint = coordinator().report().endpoint();
  to_worker.send(endpoint);
  ASSERT_EQ(from_worker.receive(), "has a batch");
  EXPECT_EQ(rings_of(service->pid()), 1);
  DataClient client(client_options(endpoint, "w1"), security_, soon());
  expect_batch(client, 5);
  EXPECT_EQ(rings_of(service->pid()), 2);

  worker.signal(SIGKILL);
  const Deadline deadline = soon();
  while (rings_of(service->pid()) > 1 && !deadline.passed()) ::usleep(5000);
  EXPECT_EQ(rings_of(service->pid()), 1);
  expect_batch(client, 6);
  coordinator().stop_service(true);
  expect_exit(*service, 0);
}

TEST_F(DataServiceTest, AKilledServiceIsNamedAndLeavesNothingBehind) {
  const auto service = fork_service();
  const std::string endpoint = coordinator().report().endpoint();
  DataClient client(client_options(endpoint, "w0"), security_, soon());
  expect_batch(client, 0);
  service->signal(SIGKILL);
  ASSERT_TRUE(service->wait(soon()).has_value());
  client.request(Split::kTrain, std::vector<int64_t>{1});
  EXPECT_THAT(error_of<PeerError>([&] { client.next(soon()); }), HasSubstr("has died"));
  for (const auto& entry : std::filesystem::directory_iterator(cache_.path())) {
    EXPECT_TRUE(entry.path().filename().string().starts_with("index-")) << entry.path();
  }
}

TEST_F(DataServiceTest, LeavesAtOnceOnSigtermWhenNobodyUsesIt) {
  const auto service = fork_service();
  coordinator().report();
  service->signal(SIGTERM);
  expect_exit(*service, 0);
}

TEST_F(DataServiceTest, LeavesOnSigtermWhileItStillLooksForTheCoordinator) {
  const Pipe ready;
  ForkedProcess service([&] {
    ready.send("about to start");
    return run_data_service(options());
  });
  ready.receive();
  // The signal may come before the handler is there: then it kills, which is an exit as well.
  service.signal(SIGTERM);
  EXPECT_TRUE(service.wait(Deadline::after(std::chrono::seconds(10))).has_value());
}

TEST_F(DataServiceTest, OnSigtermServesUntilItsWorkersHaveLeft) {
  const Pipe to_worker;
  const Pipe from_worker;
  const auto service = fork_service();
  ForkedProcess worker([&] {
    DataClient client(client_options(to_worker.receive(), "w0"), security_, soon());
    from_worker.send("ready");
    to_worker.receive();
    for (int64_t id = 0; id < 50; ++id) {
      client.request(Split::kTrain, std::vector<int64_t>{id});
      client.release(client.next(soon()));
    }
    return 3;
  });
  to_worker.send(coordinator().report().endpoint());
  ASSERT_EQ(from_worker.receive(), "ready");
  service->signal(SIGTERM);
  EXPECT_TRUE(coordinator().saw_leaving(soon()));
  to_worker.send("go on");
  expect_exit(worker, 3);
  expect_exit(*service, 0);
}

TEST_F(DataServiceTest, EndsWhenTheCoordinatorIsGone) {
  const auto service = fork_service();
  coordinator(/*heartbeat_s=*/0.1).report();
  coordinator().vanish();
  expect_exit(*service, 8);  // an exception ended it: see ForkedProcess
}

}  // namespace
}  // namespace muster
