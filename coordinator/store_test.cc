#include "coordinator/store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace muster {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(RendezvousStoreTest, AGetWaitsForItsSet) {
  RendezvousStore store;
  store.begin_generation(1);
  EXPECT_FALSE(store.get("1/a", "p"));
  EXPECT_FALSE(store.get("1/a", "q"));
  EXPECT_FALSE(store.get("1/a", "p")) << "asking twice is answered once";
  EXPECT_FALSE(store.get("1/b", "p"));
  EXPECT_THAT(store.set("1/a", std::string("\0x", 2)), ElementsAre("p", "q"));
  EXPECT_EQ(store.get("1/a", "r"), std::string("\0x", 2));
  EXPECT_THAT(store.set("1/a", "again"), IsEmpty());
}

TEST(RendezvousStoreTest, KeysLiveWithTheirGeneration) {
  RendezvousStore store;
  EXPECT_THAT(store.set("1/a", "too early"), IsEmpty());
  store.begin_generation(1);
  store.set("1/a", "x");
  EXPECT_FALSE(store.get("1/b", "p"));
  store.begin_generation(2);
  EXPECT_FALSE(store.get("1/a", "p"));
  EXPECT_THAT(store.set("1/b", "a straggler's"), IsEmpty());
  EXPECT_FALSE(store.get("1/b", "p"));
  EXPECT_FALSE(store.get("2/a", "p"));
  EXPECT_THAT(store.set("2/a", "y"), ElementsAre("p"));
}

}  // namespace
}  // namespace muster
