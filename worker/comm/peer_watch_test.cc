// The cases that exchanges alone cannot see: see also gloo_fault_test.cc.
#include "worker/comm/peer_watch.h"

#include <gloo/transport/address.h>
#include <gloo/transport/context.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>
#include <gtest/gtest.h>

#include <csignal>
#include <future>
#include <set>

#include "common/error.h"
#include "worker/comm/gloo_communicator.h"
#include "worker/comm/testing.h"

namespace muster {
namespace {

// Gloo itself does nothing about the signal, and here is no GlooMesh that does.
struct IgnoreSigpipe {
  void (*former)(int) = std::signal(SIGPIPE, SIG_IGN);
  ~IgnoreSigpipe() { std::signal(SIGPIPE, former); }
};

// One for each rank, every one connected to every other.
std::vector<std::shared_ptr<gloo::transport::Context>> connect_contexts(int world) {
  const auto device = gloo::transport::tcp::CreateDevice(gloo::transport::tcp::attr("127.0.0.1"));
  std::vector<std::shared_ptr<gloo::transport::Context>> contexts;
  for (int rank = 0; rank < world; ++rank) {
    contexts.push_back(device->createContext(rank, world));
    contexts.back()->setTimeout(std::chrono::seconds(20));
    for (int peer = 0; peer < world; ++peer) {
      if (peer != rank) contexts.back()->createPair(peer);
    }
  }
  for (int rank = 0; rank < world; ++rank) {
    for (int peer = 0; peer < rank; ++peer) {
      const auto& mine = contexts[rank]->getPair(peer);
      const auto& theirs = contexts[peer]->getPair(rank);
      // Both before either connects: a connected pair has another address.
      const std::vector<char> here = mine->address().bytes();
      const std::vector<char> there = theirs->address().bytes();
      auto other = std::async(std::launch::async, [&] { theirs->connect(here); });
      mine->connect(there);
      other.get();
    }
  }
  return contexts;
}

// Rank 2 leaves when its part is done, while rank 0 still waits for rank 1.
TEST(PeerWatch, LeavingAfterTheLastCollectiveDisturbsNobody) {
  std::promise<void> left;
  std::shared_future<void> has_left = left.get_future().share();
  testing::InMemoryStore store;
  const auto connect = [&store](int rank) {
    CommunicatorOptions options;
    options.rank = rank;
    options.world_size = 3;
    options.timeout_s = 20.0;
    return make_communicator(options, store);
  };
  const auto begin = [](Communicator& comm, const Tensor& values) {
    values.data<float>()[0] = 1.0f + comm.rank();
    return comm.all_reduce(values);
  };
  std::vector<std::future<float>> sums;
  for (const int rank : {0, 1, 2}) {
    sums.push_back(std::async(std::launch::async, [&, rank] {
      auto comm = connect(rank);
      const Tensor first({1}, DType::kFloat32);
      begin(*comm, first)->wait(Stream::cpu());
      if (rank == 2) {
        comm.reset();
        left.set_value();
        return first.data<float>()[0];
      }
      EXPECT_EQ(has_left.wait_for(std::chrono::seconds(10)), std::future_status::ready);
      // Long enough for a wrong report to come: the watch looks every 20 ms.
      std::promise<void> nothing;
      nothing.get_future().wait_for(std::chrono::milliseconds(150));
      // Still alive: the error names the rank that is needed and gone, not a past report.
      const Tensor second({1}, DType::kFloat32);
      std::string error;
      try {
        begin(*comm, second)->wait(Stream::cpu());
      } catch (const PeerError& e) {
        error = e.what();
      }
      EXPECT_EQ(error.rfind("all_reduce", 0), 0u) << error;
      return first.data<float>()[0];
    }));
  }
  for (auto& sum : sums) EXPECT_EQ(sum.get(), 6.0f);
}

// One that dies between the connection and the watch is a lost peer like any other.
TEST(PeerWatch, APeerThatIsGoneAlreadyIsNamed) {
  const IgnoreSigpipe ignore_sigpipe;
  const auto contexts = connect_contexts(2);
  contexts[1]->getPair(0)->close();
  char byte = 0;
  const auto end = contexts[0]->createUnboundBuffer(&byte, 1);
  try {
    end->recv(1, 7);
    end->waitRecv(std::chrono::seconds(20));
  } catch (const std::exception&) {
    // Broken, as it is to be.
  }
  try {
    const PeerWatch watch(contexts[0], [](const auto&, const auto&) {});
    FAIL() << "there is nobody to watch";
  } catch (const PeerError& error) {
    EXPECT_EQ(std::string(error.what()).rfind("lost rank 1 ", 0), 0u) << error.what();
  }
}

// Rank 2 dies, rank 1 leaves because of it and may well be the first that is noticed.
TEST(PeerWatch, AllThatAreLostAreNamed) {
  const IgnoreSigpipe ignore_sigpipe;
  const auto contexts = connect_contexts(4);
  std::promise<std::set<int>> noticed;
  const PeerWatch watch(contexts[0],
                        [&](const std::set<int>& lost, const auto&) { noticed.set_value(lost); });
  EXPECT_EQ(watch.lost(), std::set<int>());
  contexts[2]->getPair(0)->close();
  contexts[1]->getPair(0)->close();
  auto first = noticed.get_future();
  ASSERT_EQ(first.wait_for(std::chrono::seconds(5)), std::future_status::ready);
  EXPECT_FALSE(first.get().empty());  // one may be seen before the other
  const std::set<int> both{1, 2};
  const Deadline deadline = Deadline::after(std::chrono::seconds(5));
  while (watch.lost() != both && !deadline.passed()) std::this_thread::yield();
  EXPECT_EQ(watch.lost(), both);
}

TEST(PeerWatch, KnowsWhoHasLeftInGoodOrder) {
  testing::InMemoryStore store;
  const auto connect = [&store](int rank) {
    CommunicatorOptions options;
    options.rank = rank;
    options.world_size = 2;
    return std::make_unique<GlooCommunicator>(options, store);
  };
  auto other = std::async(std::launch::async, connect, 1);
  const auto comm = connect(0);
  auto peer = other.get();
  EXPECT_EQ(comm->departed(), "");
  peer.reset();
  const Deadline deadline = Deadline::after(std::chrono::seconds(5));
  while (comm->departed().empty() && !deadline.passed()) std::this_thread::yield();
  EXPECT_EQ(comm->departed(), "rank 1");
  EXPECT_NO_THROW(comm->check_alive());
}

// An idle rank learns of an abort elsewhere without calling anything.
TEST(PeerWatch, IdleRankHearsOfAnAbort) {
  testing::run_ranks(2, [](Communicator& comm) {
    comm.barrier();
    if (comm.rank() == 0) {
      comm.abort("the generation ends");
      return;
    }
    const Deadline deadline = Deadline::after(std::chrono::seconds(5));
    for (;;) {
      ASSERT_FALSE(deadline.passed()) << "nothing heard";
      try {
        // With rank 0 gone this cannot succeed; it fails at once from when the watch has reported.
        const Tensor one = Tensor::zeros({1}, DType::kFloat32);
        comm.all_reduce(one)->wait(Stream::cpu());
        FAIL() << "a sum without rank 0";
      } catch (const PeerError& e) {
        EXPECT_NE(std::string(e.what()).find("lost rank 0"), std::string::npos) << e.what();
        return;
      }
    }
  });
}

}  // namespace
}  // namespace muster
