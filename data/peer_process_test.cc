#include "data/peer_process.h"

#include "data/testing.h"

namespace muster {
namespace {

TEST(PeerProcess, SeesThatAProcessHasDied) {
  ForkedProcess child([] {
    ::pause();
    return 0;
  });
  const PeerProcess peer(child.pid());
  EXPECT_TRUE(peer.alive());
  EXPECT_EQ(peer.pid(), child.pid());
  child.signal(SIGKILL);
  const Deadline deadline = soon();
  while (peer.alive() && !deadline.passed()) ::usleep(1000);
  EXPECT_FALSE(peer.alive()) << "dead, though nobody has reaped it";
  child.wait(soon());
  EXPECT_FALSE(peer.alive());
}

TEST(PeerProcess, RefusesOneThatIsNotThere) {
  ForkedProcess child([] { return 0; });
  const pid_t pid = child.pid();
  ASSERT_TRUE(child.wait(soon()).has_value());
  EXPECT_THAT(error_of<PeerError>([&] { PeerProcess peer(pid); }),
              testing::HasSubstr("process " + std::to_string(pid) + " cannot be watched"));
}

}  // namespace
}  // namespace muster
