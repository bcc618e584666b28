// Ranks that die, hang or never come. Real processes where one is killed.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <future>

#include "common/error.h"
#include "common/files.h"
#include "worker/comm/process_testing.h"
#include "worker/comm/testing.h"

namespace muster {
namespace {

using testing::FolderStore;
using testing::InMemoryStore;
using testing::SpeakingProcess;

// A rank in a process of its own.
class RankProcess : public SpeakingProcess {
 public:
  RankProcess(int rank, int world, const std::string& folder,
              const std::function<void(Communicator&, int say)>& body)
      : SpeakingProcess([&](int say) {
          FolderStore store(folder);
          CommunicatorOptions options;
          options.rank = rank;
          options.world_size = world;
          options.timeout_s = 30.0;
          const auto communicator = make_communicator(options, store);
          body(*communicator, say);
        }) {}
};

// Collectives that take a while, one after the other, until something breaks.
void collectives_without_end(Communicator& comm, int say) {
  const int64_t n = 1 << 20;
  const Tensor full = Tensor::zeros({n * comm.world_size()}, DType::kFloat32);
  const Tensor shard = Tensor::zeros({n}, DType::kFloat32);
  for (int round = 0;; ++round) {
    comm.all_gather(full, shard)->wait(Stream::cpu());
    comm.reduce_scatter(shard, full)->wait(Stream::cpu());
    if (round == 1) write_all(say, "running\n", "pipe");
  }
}

TEST(GlooFaults, KilledRankIsReportedByTheOthersAtOnce) {
  const TempDir folder("gloo_faults");
  std::vector<std::unique_ptr<RankProcess>> ranks;
  ranks.reserve(3);
  for (int rank = 0; rank < 3; ++rank) {
    ranks.push_back(std::make_unique<RankProcess>(rank, 3, folder.path(), collectives_without_end));
  }
  for (const auto& rank : ranks) {
    ASSERT_EQ(rank->hear(Deadline::after(std::chrono::seconds(20))), "running");
  }
  ranks[1]->kill(SIGKILL);
  const Deadline deadline = Deadline::after(std::chrono::seconds(5));
  for (const int survivor : {0, 2}) {
    const std::string outcome = ranks[survivor]->hear(deadline);
    EXPECT_EQ(outcome.rfind("PeerError", 0), 0u) << survivor << ": " << outcome;
    EXPECT_NE(outcome.find('1'), std::string::npos) << survivor << ": " << outcome;
  }
}

// Two ranks: a third that hears of the death first would close its connections too, and might be
// the one that is named.
TEST(GlooFaults, KilledRankIsNamedByAnExchange) {
  const TempDir folder("gloo_faults");
  const auto body = [](Communicator& comm, int say) {
    const Tensor bytes = Tensor::zeros({int64_t{64} << 20}, DType::kUInt8);
    const Tensor reply = Tensor::zeros({1}, DType::kUInt8);
    comm.barrier();
    write_all(say, "running\n", "pipe");
    if (comm.rank() == 1) pause();
    comm.exchange({{1, bytes}}, {{1, reply}})->wait(Stream::cpu());
  };
  const RankProcess survivor(0, 2, folder.path(), body);
  const RankProcess victim(1, 2, folder.path(), body);
  for (const RankProcess* rank : {&survivor, &victim}) {
    ASSERT_EQ(rank->hear(Deadline::after(std::chrono::seconds(20))), "running");
  }
  victim.kill(SIGKILL);
  const std::string outcome = survivor.hear(Deadline::after(std::chrono::seconds(5)));
  EXPECT_EQ(outcome.rfind("PeerError", 0), 0u) << outcome;
  EXPECT_NE(outcome.find("rank 1"), std::string::npos) << outcome;
}

TEST(GlooFaults, AbortEndsAnExchange) {
  testing::run_ranks(3, [](Communicator& comm) {
    const Tensor bytes = Tensor::zeros({1 << 20}, DType::kUInt8);
    comm.barrier();
    // Nobody sends to rank 0.
    const auto work =
        comm.rank() == 0 ? comm.exchange({}, {{2, bytes}}) : comm.exchange({}, {{0, bytes}});
    if (comm.rank() == 1) comm.abort("asked to stop");
    try {
      work->wait(Stream::cpu());
      ADD_FAILURE() << "an aborted exchange returned";
    } catch (const PeerError& e) {
      EXPECT_TRUE(comm.rank() != 1 || std::string(e.what()) == "asked to stop") << e.what();
    }
    EXPECT_THROW(comm.exchange({}, {}), PeerError);
  });
}

// A stopped process keeps its connections: only the deadline ends the wait.
TEST(GlooFaults, StoppedRankIsNamedAtTheDeadline) {
  InMemoryStore store;
  const auto options_of = [](int rank) {
    CommunicatorOptions options;
    options.rank = rank;
    options.world_size = 3;
    options.timeout_s = rank == 0 ? 0.5 : 20.0;
    return options;
  };
  auto absent =
      std::async(std::launch::async, [&] { return make_communicator(options_of(2), store); });
  auto other = std::async(std::launch::async, [&] {
    const auto comm = make_communicator(options_of(1), store);
    const Tensor one = Tensor::zeros({1}, DType::kFloat32);
    EXPECT_THROW(comm->all_reduce(one)->wait(Stream::cpu()), PeerError);
  });
  const auto comm = make_communicator(options_of(0), store);
  const auto keep_connected = absent.get();
  const Tensor one = Tensor::zeros({1}, DType::kFloat32);
  try {
    comm->all_reduce(one)->wait(Stream::cpu());
    FAIL() << "a sum without rank 2 returned";
  } catch (const TimeoutError& e) {
    EXPECT_STREQ(e.what(), "all_reduce: no answer from rank 2 within 0.5 s");
  }
  EXPECT_THROW(comm->barrier(), PeerError);
  EXPECT_GT(comm->wait_seconds(), 0.4);
  // Rank 1 learns of it by the closed connection, long before its own deadline.
  EXPECT_EQ(other.wait_for(std::chrono::seconds(5)), std::future_status::ready);
}

TEST(GlooFaults, RankThatNeverArrivesIsNamed) {
  InMemoryStore store;
  std::vector<std::future<std::string>> outcomes;
  for (const int rank : {0, 1}) {
    outcomes.push_back(std::async(std::launch::async, [&store, rank]() -> std::string {
      CommunicatorOptions options;
      options.rank = rank;
      options.world_size = 3;
      options.store_prefix = "7/";
      options.timeout_s = 0.4;
      try {
        make_communicator(options, store);
      } catch (const TimeoutError& e) {
        return e.what();
      }
      return "it connected";
    }));
  }
  for (auto& outcome : outcomes) {
    const std::string message = outcome.get();
    EXPECT_NE(message.find("rank 2 of 3 did not arrive"), std::string::npos) << message;
    EXPECT_NE(message.find("7/gloo/2"), std::string::npos) << message;
  }
}

// A peer that died after it had published its addresses.
TEST(GlooFaults, ConnectionRefusedNamesTheRank) {
  InMemoryStore store;
  CommunicatorOptions options;
  options.world_size = 2;
  options.rank = 1;
  options.timeout_s = 0.3;
  EXPECT_THROW(make_communicator(options, store), TimeoutError);
  options.rank = 0;
  options.timeout_s = 1.0;
  try {
    make_communicator(options, store);
    FAIL() << "it connected to nobody";
  } catch (const PeerError& e) {
    EXPECT_NE(std::string(e.what()).find("rank 1 of 2"), std::string::npos) << e.what();
  }
}

TEST(GlooFaults, AbortEndsWaitsHereAndOnThePeers) {
  const auto begin = std::chrono::steady_clock::now();
  std::atomic<int> ended{0};
  try {
    testing::run_ranks(3, [&](Communicator& comm) {
      comm.barrier();
      if (comm.rank() == 2) return;  // leaves: closes its connections
      const Tensor values = Tensor::zeros({100'000}, DType::kFloat32);
      const auto work = comm.all_reduce(values);
      if (comm.rank() == 0) comm.abort("asked to stop");
      try {
        work->wait(Stream::cpu());
        ADD_FAILURE() << "an aborted sum returned";
      } catch (const PeerError& e) {
        ++ended;
        EXPECT_TRUE(comm.rank() == 1 || std::string(e.what()) == "asked to stop") << e.what();
      }
      EXPECT_THROW(comm.barrier(), PeerError);
    });
  } catch (const std::exception& e) {
    FAIL() << e.what();
  }
  EXPECT_EQ(ended, 2);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
}

TEST(GlooFaults, AbortFromAnotherThreadWhileWaiting) {
  std::promise<void> finished;
  testing::run_ranks(2, [&](Communicator& comm) {
    comm.barrier();
    if (comm.rank() == 1) {  // stays connected and takes no part
      EXPECT_EQ(finished.get_future().wait_for(std::chrono::seconds(10)),
                std::future_status::ready);
      return;
    }
    const Tensor values = Tensor::zeros({8}, DType::kFloat32);
    const auto work = comm.all_reduce(values);
    std::thread aborter([&] { comm.abort("the coordinator ended the generation"); });
    try {
      work->wait(Stream::cpu());
      ADD_FAILURE() << "a sum that rank 1 took no part in returned";
    } catch (const PeerError& e) {
      EXPECT_STREQ(e.what(), "the coordinator ended the generation");
    }
    aborter.join();
    finished.set_value();
  });
}

// Work that nobody waits for must not outlive its buffers.
TEST(GlooFaults, DroppedWorkIsWaitedFor) {
  testing::run_ranks(2, [](Communicator& comm) {
    for (int i = 0; i < 20; ++i) {
      const Tensor values = Tensor::zeros({50'000}, DType::kFloat32);
      comm.all_reduce(values);
    }
    comm.barrier();
  });
}

}  // namespace
}  // namespace muster
