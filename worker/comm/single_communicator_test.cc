#include "worker/comm/single_communicator.h"

#include <gtest/gtest.h>

#include "common/error.h"

namespace muster {
namespace {

TEST(SingleCommunicator, AfterAbortEveryCallFailsWithTheFirstReason) {
  SingleCommunicator comm;
  comm.barrier();
  comm.abort("rank 0 was asked to leave");
  comm.abort("something later");
  const Tensor one = Tensor::zeros({1}, DType::kFloat32);
  EXPECT_THROW(comm.all_reduce(one), PeerError);
  EXPECT_THROW(comm.all_gather(one, one), PeerError);
  EXPECT_THROW(comm.reduce_scatter(one, one), PeerError);
  EXPECT_THROW(comm.exchange({}, {}), PeerError);
  try {
    comm.barrier();
    FAIL() << "a barrier after abort returned";
  } catch (const PeerError& e) {
    EXPECT_STREQ(e.what(), "rank 0 was asked to leave");
  }
}

TEST(SingleCommunicatorDeathTest, HasNobodyToExchangeWith) {
  SingleCommunicator comm;
  comm.exchange({}, {})->wait(Stream::cpu());
  const Tensor one = Tensor::zeros({1}, DType::kUInt8);
  EXPECT_DEATH(comm.exchange({{0, one}}, {{0, one}}), "no peers");
}

}  // namespace
}  // namespace muster
