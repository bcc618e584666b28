#include "data/text/glob.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

GlobMatch match(const char* pattern, const char* path) {
  return match_glob(split_path(pattern), split_path(path));
}

TEST(Glob, MatchesNamesAndFolders) {
  EXPECT_EQ(match("*.txt", "a.txt"), GlobMatch::kYes);
  EXPECT_EQ(match("*.txt", "a.rst"), GlobMatch::kNo);
  EXPECT_EQ(match("*.txt", "sub/a.txt"), GlobMatch::kNo);
  EXPECT_EQ(match("*/a?.[a-t]xt", "sub/a1.txt"), GlobMatch::kYes);
  EXPECT_EQ(match("*/a?.[a-t]xt", "sub"), GlobMatch::kBelow);
  EXPECT_EQ(match("docs*", "docs1/deep/a.txt"), GlobMatch::kYes) << "a matched folder is walked";
}

TEST(Glob, MatchesAnyNumberOfFolders) {
  for (const char* path : {"a.txt", "x/a.txt", "x/y/z/a.txt"}) {
    EXPECT_EQ(match("**/*.txt", path), GlobMatch::kYes) << path;
  }
  EXPECT_EQ(match("**/*.txt", "x/y"), GlobMatch::kBelow);
  EXPECT_EQ(match("src/**/doc/*.txt", "src/a/b/doc/x.txt"), GlobMatch::kYes);
  EXPECT_EQ(match("src/**/doc/*.txt", "src/doc/x.txt"), GlobMatch::kYes);
  EXPECT_EQ(match("src/**/doc/*.txt", "other/doc/x.txt"), GlobMatch::kNo);
  EXPECT_EQ(match("src/**", "src/a/b.txt"), GlobMatch::kYes);
  EXPECT_EQ(match("src/**", "src"), GlobMatch::kBelow);
}

TEST(Glob, LeavesHiddenNamesOutUnlessSpelledOut) {
  EXPECT_EQ(match("*", ".git"), GlobMatch::kNo);
  EXPECT_NE(match("**/*.txt", ".git/a.txt"), GlobMatch::kYes);
  EXPECT_NE(match("src/**", "src/.git/a.txt"), GlobMatch::kYes);
  EXPECT_NE(match("docs*", "docs1/.cache/a.txt"), GlobMatch::kYes);
  EXPECT_EQ(match(".g*/*.txt", ".git/a.txt"), GlobMatch::kYes);
}

}  // namespace
}  // namespace muster
