#include <gtest/gtest.h>

#include "common/error.h"
#include "worker/comm/gloo_mesh.h"

namespace muster {
namespace {

TEST(LocalAddress, LoopbackByDefaultAndTowardsItself) {
  EXPECT_EQ(local_address("", ""), "127.0.0.1");
  EXPECT_EQ(local_address("", "127.0.0.1"), "127.0.0.1");
  EXPECT_EQ(local_address("lo", "203.0.113.9"), "127.0.0.1");
  EXPECT_EQ(local_address("", "[127.0.0.1]"), "127.0.0.1") << "as in an endpoint";
}

TEST(LocalAddress, TheInterfaceOfAnAddress) {
  EXPECT_EQ(interface_of("127.0.0.1"), "lo");
  EXPECT_EQ(interface_of("203.0.113.9"), "");
}

TEST(LocalAddress, UnknownHostIsNamed) {
  try {
    local_address("", "no-such-host.invalid");
    FAIL() << "a host that does not exist was resolved";
  } catch (const PeerError& e) {
    EXPECT_NE(std::string(e.what()).find("no-such-host.invalid"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace muster
