#include "data/client.h"

#include <unistd.h>

#include <future>
#include <optional>

#include "data/batch_server.h"
#include "data/service_testing.h"

namespace muster {
namespace {

using testing::HasSubstr;

constexpr int64_t kLength = 16;

class DataClientTest : public testing::Test {
 protected:
  DataClientTest() {
    corpus_.add("a.txt", text_);
    DatasetOptions options;
    options.sources = {corpus_.path()};
    options.cache_dir = cache_.path();
    options.held_out = 0;
    options.sequence_length = kLength;
    dataset_.emplace(options);
  }
  ~DataClientTest() override { thread_ = {}; }

  void start(const Security& security = {}) {
    std::promise<std::string> endpoint;
    thread_ = std::jthread([&, security](const std::stop_token& stop) {
      BatchServer server(*dataset_, security, 2);
      endpoint.set_value(server.endpoint());
      server.run(stop);
    });
    options_.endpoint = endpoint.get_future().get();
    options_.member_id = "worker";
    options_.micro_batch = 4;
    options_.sequence_length = kLength;
  }
  void expect_sample(const Batch& batch, int64_t row, int64_t id) const {
    EXPECT_EQ(batch.ids[static_cast<size_t>(row)], id);
    for (int64_t i = 0; i < kLength; ++i) {
      ASSERT_EQ(batch.tokens.data<int32_t>()[row * kLength + i],
                text_[static_cast<size_t>(id * kLength + i)]);
    }
  }

  const std::string text_ = some_text(50'000, 1);
  Corpus corpus_;
  Corpus cache_;
  std::optional<Dataset> dataset_;
  DataClientOptions options_;
  std::jthread thread_;
};

TEST_F(DataClientTest, GetsBatchesInTheOrderOfItsRequests) {
  start();
  options_.slots = 5;
  DataClient client(options_, {}, soon());
  int64_t asked = 0;
  int64_t got = 0;
  const auto ids = [](int64_t i) { return std::vector<int64_t>{i * 31 % 3000, i, 0}; };
  while (got < 500) {
    while (client.free_slots() > 0) client.request(Split::kTrain, ids(asked++));
    EXPECT_EQ(client.outstanding(), 5);
    const Batch& batch = client.next(soon());
    ASSERT_EQ(batch.samples, 3);
    for (int64_t row = 0; row < 3; ++row) {
      expect_sample(batch, row, ids(got)[static_cast<size_t>(row)]);
    }
    EXPECT_EQ(client.free_slots(), 0) << "held until released";
    client.release(batch);
    ++got;
  }
  EXPECT_GT(client.data_wait_s(), 0);
}

TEST_F(DataClientTest, HoldsSeveralBatchesAndReleasesThemInAnyOrder) {
  start();
  options_.slots = 3;
  DataClient client(options_, {}, soon());
  for (int64_t i = 0; i < 3; ++i) client.request(Split::kTrain, std::vector{i});
  const Batch& first = client.next(soon());
  const Batch& second = client.next(soon());
  client.release(second);
  client.request(Split::kTrain, std::vector<int64_t>{7});
  const Batch& third = client.next(soon());
  expect_sample(first, 0, 0);
  expect_sample(third, 0, 2);
  client.release(third);
  client.release(first);
  expect_sample(client.next(soon()), 0, 7);
}

TEST_F(DataClientTest, PassesOnWhyABatchFailedAndGoesOn) {
  start();
  DataClient client(options_, {}, soon());
  client.request(Split::kTrain, std::vector<int64_t>{999'999});
  client.request(Split::kTrain, std::vector<int64_t>{3});
  EXPECT_THAT(error_of<DataError>([&] { client.next(soon()); }),
              HasSubstr("sample 999999 does not exist"));
  expect_sample(client.next(soon()), 0, 3);
  EXPECT_EQ(client.free_slots(), options_.slots - 1);
}

TEST_F(DataClientTest, WorksUnderARunKeyAndIsRefusedUnderAnother) {
  const Security security{generate_run_key()};
  start(security);
  DataClient client(options_, security, soon());
  client.request(Split::kTrain, std::vector<int64_t>{3});
  expect_sample(client.next(soon()), 0, 3);
  const Security wrong{generate_run_key()};
  EXPECT_THAT(error_of<PeerError>([&] { DataClient other(options_, wrong, soon()); }),
              HasSubstr("data service"));
}

TEST_F(DataClientTest, SaysWhyItWasRefused) {
  start();
  options_.sequence_length = kLength + 1;
  EXPECT_THAT(error_of<PeerError>([&] { DataClient client(options_, {}, soon()); }),
              HasSubstr("samples of 17 tokens, the run has 16"));
}

TEST_F(DataClientTest, NamesTheServiceThatDoesNotAnswer) {
  options_.endpoint = random_endpoint();
  options_.sequence_length = kLength;
  EXPECT_THAT(error_of<TimeoutError>([&] {
                DataClient client(options_, {}, Deadline::after(std::chrono::milliseconds(50)));
              }),
              testing::AllOf(HasSubstr("data service"), HasSubstr(options_.endpoint)));
}

// Services that are processes, to be killed. Fork them before anything else runs.
class ServiceProcess {
 public:
  explicit ServiceProcess(const DatasetOptions& options) {
    int ends[2];
    EXPECT_EQ(::pipe(ends), 0);
    process_.emplace([&] {
      Dataset dataset(options);
      BatchServer server(dataset, {}, 2);
      write_all(ends[1], server.endpoint() + "\n", "pipe");
      server.run({});
      return 0;
    });
    ::close(ends[1]);
    const Fd from(ends[0]);
    char c = 0;
    while (::read(from.get(), &c, 1) == 1 && c != '\n') endpoint_ += c;
  }
  const std::string& endpoint() const { return endpoint_; }
  void kill() { process_.reset(); }

 private:
  std::optional<ForkedProcess> process_;
  std::string endpoint_;
};

class DataClientMoves : public DataClientTest {
 protected:
  DataClientMoves() {
    dataset_options_.sources = {corpus_.path()};
    dataset_options_.cache_dir = cache_.path();
    dataset_options_.held_out = 0;
    dataset_options_.sequence_length = kLength;
    options_.member_id = "worker";
    options_.micro_batch = 4;
    options_.sequence_length = kLength;
    // As the coordinator's word does: an old answer until there is a new one.
    options_.successor = [this](const std::string& old, Deadline deadline) {
      asked_.push_back(old);
      if (endpoint_ == old) throw TimeoutError("no word on a new data service");
      EXPECT_FALSE(deadline.passed());
      return endpoint_;
    };
  }

  DatasetOptions dataset_options_;
  std::string endpoint_;
  std::vector<std::string> asked_;
};

TEST_F(DataClientMoves, AsksTheNextServiceForWhatAKilledOneDidNotDeliver) {
  ServiceProcess first(dataset_options_);
  ServiceProcess second(dataset_options_);
  endpoint_ = first.endpoint();
  options_.slots = 4;
  DataClient client(options_, {}, soon());
  for (int64_t id = 0; id < 4; ++id) client.request(Split::kTrain, std::vector{id});
  const Batch& held = client.next(soon());
  client.release(client.next(soon()));
  first.kill();
  endpoint_ = second.endpoint();
  client.request(Split::kTrain, std::vector<int64_t>{9});
  for (const int64_t id : {2, 3, 9}) {
    const Batch& batch = client.next(soon());
    expect_sample(batch, 0, id);
    client.release(batch);
  }
  expect_sample(held, 0, 0);
  client.release(held);
  EXPECT_EQ(client.free_slots(), 4);
  EXPECT_EQ(asked_, (std::vector<std::string>{"", first.endpoint()}));
}

TEST_F(DataClientMoves, GivesUpWhereThereIsNoOtherService) {
  ServiceProcess only(dataset_options_);
  endpoint_ = only.endpoint();
  DataClient client(options_, {}, soon());
  only.kill();
  client.request(Split::kTrain, std::vector<int64_t>{1});
  EXPECT_THAT(error_of<TimeoutError>([&] { client.next(soon()); }),
              HasSubstr("no word on a new data service"));
}

TEST_F(DataClientMoves, AWaitEndsWithWhatTheCheckThrows) {
  ServiceProcess service(dataset_options_);
  endpoint_ = service.endpoint();
  bool broken_off = false;
  options_.check = [&] {
    if (broken_off) throw PeerError("the generation is over");
  };
  DataClient client(options_, {}, soon());
  client.request(Split::kTrain, std::vector<int64_t>{1});
  service.kill();
  broken_off = true;
  EXPECT_THAT(error_of<PeerError>([&] {
                client.release(client.next(soon()));  // it may have come in time
                client.request(Split::kTrain, std::vector<int64_t>{2});
                client.next(soon());
              }),
              HasSubstr("the generation is over"));
}

// A service that opens rings and then answers as `answer` says.
class OddService {
 public:
  explicit OddService(
      const std::function<void(const proto::BatchRequest&, proto::Envelope&)>& answer)
      : ring_(SharedMemory::create("odd", static_cast<size_t>(layout_.bytes()))),
        thread_([this, answer](const std::stop_token& stop) {
          const std::stop_callback wake(stop, [this] { waker_.wake(); });
          while (!stop.stop_requested()) {
            const auto received = server_.receive(soon(), &waker_);
            if (!received) continue;
            proto::Envelope reply;
            reply.set_request_id(received->envelope.request_id());
            if (received->envelope.has_open_ring()) {
              proto::RingOpened& opened = *reply.mutable_ring_opened();
              opened.set_pid(::getpid());
              opened.set_fd(ring_.fd());
              opened.set_slots(1);
              opened.set_bytes(layout_.bytes());
              opened.set_slot_bytes(layout_.bytes());
            } else {
              answer(received->envelope.batch_request(), reply);
            }
            if (reply.body_case() != proto::Envelope::BODY_NOT_SET) {
              server_.send(received->peer, std::move(reply));
            }
          }
        }) {}
  DataClientOptions options() const { return {server_.endpoint(), "worker", 1, 1, kLength}; }

 private:
  SlotLayout layout_{1, kLength};
  SharedMemory ring_;
  Server server_{random_endpoint(), Security{}};
  Waker waker_;
  std::jthread thread_;  // last
};

TEST(DataClientAgainstOddService, NamesTheServiceThatStaysSilent) {
  OddService service([](const auto&, auto&) {});
  DataClient client(service.options(), {}, soon());
  client.request(Split::kTrain, std::vector<int64_t>{0});
  const std::string error =
      error_of<TimeoutError>([&] { client.next(Deadline::after(std::chrono::milliseconds(50))); });
  EXPECT_THAT(error, HasSubstr("data service (pid " + std::to_string(::getpid()) + ")"));
  EXPECT_THAT(error, HasSubstr("1 outstanding"));
  EXPECT_EQ(client.outstanding(), 1) << "the caller may wait again";
}

TEST(DataClientAgainstOddService, RefusesAStaleSlot) {
  OddService service([](const proto::BatchRequest& wish, proto::Envelope& reply) {
    reply.mutable_batch_ready()->set_tag(wish.tag());  // and nothing was written
  });
  DataClient client(service.options(), {}, soon());
  client.request(Split::kTrain, std::vector<int64_t>{0});
  EXPECT_THAT(error_of<PeerError>([&] { client.next(soon()); }), HasSubstr("another batch"));
}

TEST(DataClientAgainstOddService, RefusesAnAnswerToNothing) {
  OddService service([](const proto::BatchRequest& wish, proto::Envelope& reply) {
    reply.mutable_batch_ready()->set_tag(wish.tag() + 1);
  });
  DataClient client(service.options(), {}, soon());
  client.request(Split::kTrain, std::vector<int64_t>{0});
  EXPECT_THAT(error_of<PeerError>([&] { client.next(soon()); }), HasSubstr("not outstanding"));
}

TEST_F(DataClientTest, NextWithoutRequestIsABug) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(
      {
        start();
        DataClient client(options_, {}, soon());
        client.next(soon());
      },
      "nothing was requested");
}

}  // namespace
}  // namespace muster
