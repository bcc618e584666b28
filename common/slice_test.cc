#include "common/slice.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

TEST(Slice, PartsAreContiguousAndDifferByOneAtMost) {
  for (int64_t count : {0, 1, 5, 32, 33, 1000}) {
    for (int64_t parts : {1, 2, 3, 7, 40}) {
      int64_t next = 0;
      for (int64_t part = 0; part < parts; ++part) {
        const Slice slice = slice_of(count, part, parts);
        EXPECT_EQ(slice.begin, next);
        EXPECT_GE(slice.size(), count / parts);
        EXPECT_LE(slice.size(), count / parts + 1);
        next = slice.end;
      }
      EXPECT_EQ(next, count) << count << " items in " << parts << " parts";
    }
  }
}

}  // namespace
}  // namespace muster
