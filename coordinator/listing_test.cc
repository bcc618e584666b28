#include "coordinator/listing.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

TEST(ListingTest, NamesTheFirstAndCountsTheRest) {
  Listing names;
  EXPECT_TRUE(names.empty());
  EXPECT_EQ(names.text(), "");
  names.add([] { return "a"; });
  names.add([] { return "b"; });
  EXPECT_EQ(names.text(), "a, b");
  int asked = 0;
  for (int i = 0; i < 4094; ++i) {
    names.add([&] {
      ++asked;
      return "x";
    });
  }
  EXPECT_EQ(asked, 14);
  EXPECT_EQ(names.text(), "a, b, x, x, x, x, x, x, x, x, x, x, x, x, x, x and 4080 more");
}

}  // namespace
}  // namespace muster
