#include "data/text/source_scan.h"

#include <sys/stat.h>

#include "data/testing.h"

namespace muster {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::vector<std::string> relatives(const SourceScan& scan) {
  std::vector<std::string> names;
  for (const SourceFile& file : scan.files) names.push_back(file.relative);
  return names;
}

TEST(SourceScan, WalksFoldersInTheOrderOfRelativePaths) {
  const Corpus corpus;
  // Made in another order than the expected one; "b-/x" sorts before "b/x" as bytes do.
  for (const char* name :
       {"z.txt", "b/x.md", "b-/x.rst", "b/a/c.jsonl.zst", "a.rst.txt", "B.txt.gz", "page.html",
        "pic.svg.gz", ".hidden.txt", ".git/notes.txt"}) {
    corpus.add(name, "text");
  }
  const SourceScan scan = scan_sources({corpus.path()});
  EXPECT_THAT(relatives(scan), ElementsAre("0:B.txt.gz", "0:a.rst.txt", "0:b-/x.rst",
                                           "0:b/a/c.jsonl.zst", "0:b/x.md", "0:z.txt"));
  EXPECT_EQ(scan.files[0].path, corpus.path("B.txt.gz"));
  EXPECT_EQ(scan.files[0].size, 4);
  EXPECT_NE(scan.files[0].inode, 0u);
  EXPECT_TRUE(scan.skipped.empty());
}

TEST(SourceScan, TakesFilesFoldersAndPatternsInTheirOrderEachFileOnce) {
  const Corpus corpus;
  for (const char* name : {"one/b.txt", "one/a.txt", "two/c.txt", "two/d.rst", "two/deep/e.txt"}) {
    corpus.add(name, "text");
  }
  EXPECT_THAT(relatives(scan_sources({corpus.path("two/**/*.txt"), corpus.path("one/b.txt"),
                                      corpus.path("one"), corpus.path("*")})),
              ElementsAre("0:c.txt", "0:deep/e.txt", "1:b.txt", "2:a.txt", "3:two/d.rst"));
}

TEST(SourceScan, FollowsLinksAndSurvivesLoops) {
  const Corpus corpus;
  const Corpus elsewhere;
  corpus.add("real/a.txt", "text");
  elsewhere.add("far.txt", "text");
  std::filesystem::create_symlink(corpus.path(), corpus.path("real/up"));
  std::filesystem::create_symlink("real", corpus.path("again"));
  std::filesystem::create_symlink("a.txt", corpus.path("real/b.txt"));
  std::filesystem::create_symlink(elsewhere.path(), corpus.path("out"));
  std::filesystem::create_symlink("nowhere.txt", corpus.path("dangling.txt"));
  const SourceScan scan = scan_sources({corpus.path()});
  EXPECT_THAT(relatives(scan), ElementsAre("0:again/a.txt", "0:out/far.txt"));
  ASSERT_EQ(scan.skipped.size(), 1u);
  EXPECT_EQ(scan.skipped[0].path, corpus.path("dangling.txt"));
  EXPECT_THAT(scan.skipped[0].why, HasSubstr("leads nowhere"));
}

TEST(SourceScan, SkipsWhatIsNoFileAndWhatMayNotBeRead) {
  const Corpus corpus;
  corpus.add("a.txt", "text");
  corpus.add("locked/b.txt", "text");
  ASSERT_EQ(::mkfifo(corpus.path("pipe.txt").c_str(), 0600), 0);
  ASSERT_EQ(::chmod(corpus.path("locked").c_str(), 0), 0);
  expect_as_unprivileged_user([&] {
    const SourceScan scan = scan_sources({corpus.path()});
    std::vector<std::string> skipped;
    for (const SkippedFile& file : scan.skipped) skipped.push_back(file.path + " " + file.why);
    EXPECT_THAT(skipped, ElementsAre(HasSubstr("/locked folder cannot be read: Permission denied"),
                                     corpus.path("pipe.txt") + " is not a regular file"));
    EXPECT_THAT(relatives(scan), ElementsAre("0:a.txt"));
  });
  ::chmod(corpus.path("locked").c_str(), 0700);
}

TEST(SourceScan, SaysWhichSourceIsUnusableAndWhatToDo) {
  const Corpus corpus;
  corpus.add("only/page.html", "text");
  const auto error = [](const std::string& source) {
    return error_of<DataError>([&] { scan_sources({source}); });
  };
  EXPECT_THAT(error(corpus.path("none")),
              HasSubstr("\"" + corpus.path("none") + "\" cannot be read: No such file"));
  EXPECT_THAT(error(corpus.path("none")), HasSubstr("correct the path"));
  EXPECT_THAT(error(corpus.path("only")), HasSubstr("holds no text files: expected .txt"));
  EXPECT_THAT(error(corpus.path("only/page.html")), HasSubstr("is not a text file"));
  EXPECT_THAT(error(corpus.path("*.txt")), HasSubstr("matches no text file"));
  EXPECT_THAT(error(corpus.path("none/*.txt")), HasSubstr("matches no text file"));
  EXPECT_THAT(error_of<DataError>([] { scan_sources({}); }), HasSubstr("data.sources is empty"));
}

}  // namespace
}  // namespace muster
