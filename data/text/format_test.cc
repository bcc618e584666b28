#include "data/text/format.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

TEST(TextFormat, KnowsTextByItsName) {
  EXPECT_EQ(text_format("a/b.txt"), (TextFormat{Compression::kNone, false}));
  EXPECT_EQ(text_format("b.rst.txt"), (TextFormat{Compression::kNone, false}));
  EXPECT_EQ(text_format("b.rst.gz"), (TextFormat{Compression::kGzip, false}));
  EXPECT_EQ(text_format("README.MD.ZST"), (TextFormat{Compression::kZstd, false}));
  EXPECT_EQ(text_format("x.jsonl"), (TextFormat{Compression::kNone, true}));
  EXPECT_EQ(text_format("x.jsonl.zst"), (TextFormat{Compression::kZstd, true}));
}

TEST(TextFormat, RefusesTheRest) {
  for (const char* name : {"a.html", "a.svg.gz", "a.gz", "txt", ".txt", "dir.txt/file", "a.txt.bz2",
                           "a.txt.gz.gz", "", ".gz"}) {
    EXPECT_EQ(text_format(name), std::nullopt) << name;
  }
}

}  // namespace
}  // namespace muster
