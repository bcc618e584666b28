// Sums of small integers are exact in any order, so results are compared with ==.
#include "worker/comm/communicator.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "common/error.h"
#include "worker/comm/testing.h"

namespace muster {
namespace {

using testing::InMemoryStore;
using testing::run_ranks;

// Small, different for every rank and element.
double value(int rank, int64_t i) {
  return static_cast<double>((i * 7 + rank * 13) % 101) - 50;
}
double sum_of_values(int world, int64_t i) {
  double sum = 0;
  for (int rank = 0; rank < world; ++rank) sum += value(rank, i);
  return sum;
}

struct Case {
  int world;
  std::string backend;
};
class Collectives : public ::testing::TestWithParam<Case> {
 protected:
  void run(const std::function<void(Communicator&)>& f) {
    run_ranks(GetParam().world, f, 20.0, GetParam().backend);
  }
};

// The last size takes several chunks of scratch at every world size.
const int64_t kSizes[] = {0, 1, 7, 64, 1000, 4097, 3'000'001};

TEST_P(Collectives, AllGather) {
  run([](Communicator& comm) {
    for (const int64_t n : kSizes) {
      const Tensor shard({n}, DType::kFloat32);
      for (int64_t i = 0; i < n; ++i) shard.data<float>()[i] = value(comm.rank(), i);
      const Tensor full({n * comm.world_size()}, DType::kFloat32);
      std::fill_n(full.data<float>(), full.numel(), -999.0f);
      comm.all_gather(full, shard)->wait(Stream::cpu());
      for (int64_t i = 0; i < full.numel(); ++i) {
        ASSERT_EQ(full.data<float>()[i], value(i / n, i % n)) << n << " " << i;
      }
    }
  });
}

TEST_P(Collectives, AllGatherInPlaceOfBytes) {
  run([](Communicator& comm) {
    const int64_t n = 13;
    const Tensor full = Tensor::zeros({n * comm.world_size()}, DType::kUInt8);
    const TensorView own = full.view().slice(comm.rank() * n, (comm.rank() + 1) * n);
    std::memset(own.raw(), 'a' + comm.rank(), n);
    comm.all_gather(full, own)->wait(Stream::cpu());
    for (int64_t i = 0; i < full.numel(); ++i) ASSERT_EQ(full.data<uint8_t>()[i], 'a' + i / n);
  });
}

TEST_P(Collectives, ReduceScatter) {
  run([](Communicator& comm) {
    for (const bool in_place : {false, true}) {
      for (const int64_t n : kSizes) {
        const Tensor full({n * comm.world_size()}, DType::kFloat32);
        for (int64_t i = 0; i < full.numel(); ++i) full.data<float>()[i] = value(comm.rank(), i);
        const Tensor apart({n}, DType::kFloat32);
        const int64_t begin = comm.rank() * n;
        const TensorView shard = in_place ? full.view().slice(begin, begin + n) : apart.view();
        comm.reduce_scatter(shard, full)->wait(Stream::cpu());
        for (int64_t i = 0; i < n; ++i) {
          ASSERT_EQ(shard.data<float>()[i], sum_of_values(comm.world_size(), begin + i)) << n;
        }
      }
    }
  });
}

template <typename T>
void check_all_reduce(Communicator& comm) {
  for (const int64_t n : kSizes) {
    const Tensor values({n}, dtype_of<T>());
    for (int64_t i = 0; i < n; ++i) values.data<T>()[i] = static_cast<T>(value(comm.rank(), i));
    comm.all_reduce(values)->wait(Stream::cpu());
    for (int64_t i = 0; i < n; ++i) {
      ASSERT_EQ(values.data<T>()[i], sum_of_values(comm.world_size(), i)) << n << " " << i;
    }
  }
}

TEST_P(Collectives, AllReduceFloat) {
  run(check_all_reduce<float>);
}
TEST_P(Collectives, AllReduceDouble) {
  run(check_all_reduce<double>);
}

// Every rank to the next one, more bytes the higher the rank.
TEST_P(Collectives, ExchangeInARing) {
  run([](Communicator& comm) {
    const int world = comm.world_size();
    const int rank = comm.rank();
    const auto size_from = [](int sender) { return int64_t{1'000'003} * sender + 5; };
    const auto filled = [](int64_t bytes, int fill) {
      Tensor tensor({bytes}, DType::kUInt8);
      std::memset(tensor.view().raw(), fill, bytes);
      return tensor;
    };
    if (world == 1) return comm.exchange({}, {})->wait(Stream::cpu());
    const int next = (rank + 1) % world;
    const int previous = (rank + world - 1) % world;
    for (int round = 0; round < 3; ++round) {
      const Tensor mine = filled(size_from(rank), 10 * round + rank);
      const Tensor theirs = filled(size_from(previous), 0xee);
      comm.exchange({{next, mine}}, {{previous, theirs}})->wait(Stream::cpu());
      for (int64_t i = 0; i < theirs.numel(); ++i) {
        ASSERT_EQ(theirs.data<uint8_t>()[i], 10 * round + previous) << round << " " << i;
      }
    }
  });
}

// Everybody to everybody, of another size each way; the views' types are each side's own.
TEST_P(Collectives, ExchangeOfEveryPair) {
  run([](Communicator& comm) {
    const auto size = [](int from, int to) { return int64_t{1000} * from + to; };  // of int32
    std::vector<Tensor> sent;
    std::vector<Tensor> received;
    std::vector<Parcel> outgoing;
    std::vector<Parcel> incoming;
    for (int peer = 0; peer < comm.world_size(); ++peer) {
      if (peer == comm.rank()) continue;
      sent.emplace_back(Shape{size(comm.rank(), peer)}, DType::kInt32);
      for (int64_t i = 0; i < sent.back().numel(); ++i) {
        sent.back().data<int32_t>()[i] = static_cast<int32_t>(value(comm.rank(), i + peer));
      }
      received.emplace_back(Shape{size(peer, comm.rank()) * 4}, DType::kUInt8);
      outgoing.push_back({peer, sent.back()});
      incoming.push_back({peer, received.back()});
    }
    comm.exchange(outgoing, incoming)->wait(Stream::cpu());
    for (const Parcel& parcel : incoming) {
      const auto* got = static_cast<const int32_t*>(parcel.view.raw());
      for (int64_t i = 0; i < size(parcel.peer, comm.rank()); ++i) {
        ASSERT_EQ(got[i], value(parcel.peer, i + comm.rank())) << parcel.peer << " " << i;
      }
    }
  });
}

// Rank 0 sends to the last one. The others leave the call out, or make it with nothing to say, and
// what is called before and after still meets.
TEST_P(Collectives, ExchangeWithoutOthers) {
  run([](Communicator& comm) {
    const int last = comm.world_size() - 1;
    const Tensor sum = Tensor::zeros({3}, DType::kFloat32);
    for (int round = 1; round <= 4; ++round) {
      const Tensor bytes = Tensor::zeros({70'000}, DType::kUInt8);
      const Tensor none({0}, DType::kUInt8);
      std::unique_ptr<Work> work;
      if (last > 0 && comm.rank() == 0) {
        std::memset(bytes.view().raw(), round, bytes.bytes());
        work = comm.exchange({{last, bytes}}, {{last, none}});
      } else if (last > 0 && comm.rank() == last) {
        work = comm.exchange({{0, none}}, {{0, bytes}});
      } else if (round % 2 == 0) {
        work = comm.exchange({}, {});
      }
      sum.data<float>()[0] = 1;
      comm.all_reduce(sum)->wait(Stream::cpu());
      ASSERT_EQ(sum.data<float>()[0], comm.world_size());
      if (work) work->wait(Stream::cpu());
      if (comm.rank() != last || last == 0) continue;
      for (int64_t i = 0; i < bytes.numel(); ++i) ASSERT_EQ(bytes.data<uint8_t>()[i], round);
    }
  });
}

// Fractions round, so equal bits on all ranks and in two runs need one order of the sums.
TEST_P(Collectives, AllReduceHasTheSameBitsEverywhere) {
  run([](Communicator& comm) {
    for (const int64_t n : {5, 100'003}) {
      std::string first;
      for (int repeat = 0; repeat < 2; ++repeat) {
        const Tensor values({n}, DType::kFloat32);
        for (int64_t i = 0; i < n; ++i) {
          values.data<float>()[i] = 1.0f / static_cast<float>(i % 97 + comm.rank() * 3 + 1);
        }
        comm.all_reduce(values)->wait(Stream::cpu());
        const std::string bits(reinterpret_cast<const char*>(values.data<float>()), n * 4);
        const Tensor all({n * comm.world_size()}, DType::kFloat32);
        comm.all_gather(all, values)->wait(Stream::cpu());
        for (int rank = 0; rank < comm.world_size(); ++rank) {
          ASSERT_EQ(std::memcmp(all.data<float>() + rank * n, bits.data(), bits.size()), 0);
        }
        if (repeat == 0) first = bits;
        ASSERT_EQ(first, bits);
      }
    }
  });
}

// Many collectives in flight, waited for in another order than they were asked for.
TEST_P(Collectives, ManyUnderWay) {
  run([](Communicator& comm) {
    constexpr int kCount = 40;
    std::vector<Tensor> tensors;
    std::vector<std::unique_ptr<Work>> works;
    for (int k = 0; k < kCount; ++k) {
      tensors.emplace_back(Shape{k + 1}, DType::kFloat32);
      for (int64_t i = 0; i <= k; ++i) tensors[k].data<float>()[i] = value(comm.rank(), i + k);
      works.push_back(comm.all_reduce(tensors[k]));
    }
    for (int k = kCount - 1; k >= 0; --k) works[k]->wait(Stream::cpu());
    for (int k = 0; k < kCount; ++k) {
      for (int64_t i = 0; i <= k; ++i) {
        ASSERT_EQ(tensors[k].data<float>()[i], sum_of_values(comm.world_size(), i + k));
      }
    }
    comm.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, Collectives,
                         ::testing::Values(Case{1, "single"}, Case{1, "gloo"}, Case{2, "gloo"},
                                           Case{3, "gloo"}, Case{5, "gloo"}),
                         [](const auto& test) {
                           return test.param.backend + std::to_string(test.param.world);
                         });

TEST(ExchangeDeathTest, RefusesMessagesToOneselfAndTwoToAPeer) {
  const Tensor bytes = Tensor::zeros({4}, DType::kUInt8);
  const Parcel to_one{1, bytes};
  check_parcels({to_one, {0, bytes}}, 2, 3, Device::cpu());
  EXPECT_DEATH(check_parcels({to_one}, 1, 3, Device::cpu()), "peer 1");
  EXPECT_DEATH(check_parcels({to_one, to_one}, 2, 3, Device::cpu()), "two messages for peer 1");
  EXPECT_DEATH(check_parcels({to_one}, 0, 1, Device::cpu()), "peer 1");
  EXPECT_DEATH(check_parcels({to_one}, 2, 3, Device::cuda(0)), "another device");
}

TEST(MakeCommunicator, RefusesWhatCannotWork) {
  InMemoryStore store;
  CommunicatorOptions options;
  options.world_size = 2;
  options.backend = "single";
  EXPECT_THROW(make_communicator(options, store), ConfigError);
  options.backend = "nccl";
  EXPECT_THROW(make_communicator(options, store), ConfigError) << "on CPUs";
  options.backend = "carrier pigeon";
  EXPECT_THROW(make_communicator(options, store), ConfigError);
  options.backend = "gloo";
  options.stream.device = Device::cuda(0);
  EXPECT_THROW(make_communicator(options, store), ConfigError) << "on GPUs";
}

TEST(MakeCommunicator, NamesTheInterfacesThereAre) {
  InMemoryStore store;
  CommunicatorOptions options;
  options.world_size = 2;
  options.interface_name = "nosuch0";
  try {
    make_communicator(options, store);
    FAIL() << "an unknown interface was taken";
  } catch (const ConfigError& e) {
    EXPECT_NE(std::string(e.what()).find("nosuch0"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("lo"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace muster
