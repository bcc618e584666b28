#include "data/batch_server.h"

#include <future>

#include "data/peer_process.h"
#include "data/service_testing.h"

namespace muster {
namespace {

using testing::HasSubstr;

// A server on a thread, and a bare client that speaks the protocol by hand: what DataClient would
// never send is sent here.
class BatchServerTest : public testing::Test {
 protected:
  BatchServerTest() {
    corpus_.add("a.txt", some_text(2000, 1));
    DatasetOptions options;
    options.sources = {corpus_.path()};
    options.cache_dir = cache_.path();
    options.held_out = 0;
    options.sequence_length = 16;
    dataset_.emplace(options);
  }
  ~BatchServerTest() override { thread_ = {}; }

  void start() {
    std::promise<std::string> endpoint;
    thread_ = std::jthread([&](const std::stop_token& stop) {
      BatchServer server(*dataset_, Security{}, 2);
      endpoint.set_value(server.endpoint());
      server.run(stop, [this](int rings) {
        const std::lock_guard lock(mutex_);
        rings_ = rings;
        changed_.notify_all();
      });
    });
    endpoint_ = endpoint.get_future().get();
    client_.emplace(endpoint_, Security{}, "data service");
  }
  bool wait_for_rings(int rings) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, soon().at(), [&] { return rings_ == rings; });
  }
  static proto::Envelope open(const std::string& member, int pid, int slots, int micro_batch,
                              int length) {
    proto::Envelope envelope;
    proto::OpenRing& wish = *envelope.mutable_open_ring();
    wish.set_member_id(member);
    wish.set_pid(pid);
    wish.set_slots(slots);
    wish.set_micro_batch(micro_batch);
    wish.set_sequence_length(length);
    return envelope;
  }
  proto::Envelope good_open() { return open("w", ::getpid(), 2, 4, 16); }
  // What comes back for a request of one message.
  proto::Envelope ask(int slot, uint64_t tag, const std::vector<int64_t>& samples) {
    proto::Envelope envelope;
    proto::BatchRequest& wish = *envelope.mutable_batch_request();
    wish.set_slot(slot);
    wish.set_tag(tag);
    wish.mutable_samples()->Add(samples.begin(), samples.end());
    client_->send(envelope, soon());
    auto reply = client_->receive(soon());
    EXPECT_TRUE(reply.has_value());
    return reply.value_or(proto::Envelope());
  }
  // A refusal is for good, so each wish comes from a connection of its own.
  std::string refused(const proto::Envelope& wish) {
    Client client(endpoint_, Security{}, "data service");
    return error_of<PeerError>([&] { client.call(wish, soon()); });
  }

  Corpus corpus_;
  Corpus cache_;
  std::optional<Dataset> dataset_;
  std::optional<Client> client_;
  std::string endpoint_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int rings_ = 0;
  std::jthread thread_;
};

TEST_F(BatchServerTest, FillsTheNamedSlotAndSaysSo) {
  start();
  const proto::RingOpened opened = client_->call(good_open(), soon()).ring_opened();
  EXPECT_EQ(opened.pid(), ::getpid());
  EXPECT_EQ(opened.slots(), 2);
  const SlotLayout layout(4, 16);
  EXPECT_EQ(opened.slot_bytes(), layout.bytes());
  const auto ring = SharedMemory::attach(opened.pid(), opened.fd(), opened.bytes());
  const proto::Envelope reply = ask(1, 77, {3, 0});
  ASSERT_TRUE(reply.has_batch_ready());
  EXPECT_EQ(reply.batch_ready().slot(), 1);
  EXPECT_EQ(reply.batch_ready().tag(), 77u);
  const Batch batch = layout.batch(ring.data() + layout.bytes(), 77);
  EXPECT_EQ(batch.ids[0], 3);
  const std::string text = some_text(2000, 1);
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(batch.tokens.data<int32_t>()[i], text[static_cast<size_t>(3 * 16 + i)]);
  }
  EXPECT_THROW(layout.batch(ring.data(), 77), PeerError) << "the other slot is untouched";
}

TEST_F(BatchServerTest, RefusesWhatARequestMayNotAskAndGoesOn) {
  start();
  EXPECT_THAT(ask(0, 1, {0}).batch_failed().error(), HasSubstr("no open ring"));
  client_->call(good_open(), soon());
  EXPECT_THAT(ask(2, 2, {0}).batch_failed().error(), HasSubstr("no slot 2"));
  EXPECT_THAT(ask(-1, 3, {0}).batch_failed().error(), HasSubstr("no slot -1"));
  EXPECT_THAT(ask(0, 4, {}).batch_failed().error(), HasSubstr("0 samples"));
  EXPECT_THAT(ask(0, 5, {0, 1, 2, 3, 4}).batch_failed().error(), HasSubstr("5 samples"));
  const proto::Envelope failed = ask(0, 6, {1'000'000});
  EXPECT_THAT(failed.batch_failed().error(), HasSubstr("sample 1000000 does not exist"));
  EXPECT_EQ(failed.batch_failed().tag(), 6u);
  EXPECT_EQ(failed.batch_failed().slot(), 0);
  EXPECT_TRUE(ask(0, 7, {0}).has_batch_ready());
}

TEST_F(BatchServerTest, RefusesARingThatCannotBe) {
  start();
  EXPECT_THAT(refused(open("w", ::getpid(), 2, 4, 32)), HasSubstr("samples of 32 tokens"));
  EXPECT_THAT(refused(open("w", ::getpid(), 0, 4, 16)), HasSubstr("1 to 1024 slots"));
  EXPECT_THAT(refused(open("w", ::getpid(), 2, 0, 16)), HasSubstr("cannot hold 0 samples"));
  EXPECT_THAT(refused(open("w", ::getpid(), 2, 1 << 30, 16)), HasSubstr("cannot hold"));
  EXPECT_THAT(refused(open("w", ::getpid(), 1024, 1 << 20, 16)), HasSubstr("lower data.prefetch"));
  EXPECT_THAT(refused(open("w", 0x3fffffff, 2, 4, 16)), HasSubstr("cannot be watched"));
}

TEST_F(BatchServerTest, FreesTheRingOfAWorkerThatDied) {
  ForkedProcess worker([] {
    ::pause();
    return 0;
  });
  start();
  client_->call(open("w1", worker.pid(), 2, 4, 16), soon());
  EXPECT_TRUE(wait_for_rings(1));
  worker.signal(SIGKILL);
  EXPECT_TRUE(wait_for_rings(0));
}

TEST_F(BatchServerTest, AMemberThatOpensAgainGivesUpItsFirstRing) {
  start();
  client_->call(good_open(), soon());
  EXPECT_TRUE(wait_for_rings(1));
  client_->call(good_open(), soon());
  client_->call(open("another", ::getpid(), 1, 1, 16), soon());
  EXPECT_TRUE(wait_for_rings(1)) << "the same connection holds one ring";
}

}  // namespace
}  // namespace muster
