#include "data/text/text_index.h"

#include <fcntl.h>
#include <sys/stat.h>

#include "common/hash.h"
#include "data/testing.h"
#include "data/text/index_cache.h"

namespace muster {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class TextIndexTest : public testing::Test {
 protected:
  TextIndex build(int threads = 2) const {
    return build_text_index({corpus_.path()}, *tokenizer_, cache_.path(), threads);
  }
  std::string cache_file() const {
    return index_cache_path(cache_.path(), {corpus_.path()}, *tokenizer_);
  }
  std::vector<uint64_t> hashes(const TextIndex& index) const {
    std::vector<uint64_t> found;
    for (const IndexedDocument& document : index.documents) found.push_back(document.hash);
    return found;
  }
  static uint64_t hash(const std::string& text) { return xxh3(text.data(), text.size()); }

  Corpus corpus_;
  Corpus cache_;
  std::unique_ptr<Tokenizer> tokenizer_ = make_tokenizer("bytes");
};

TEST_F(TextIndexTest, ListsDocumentsInTheOrderOfTheFiles) {
  corpus_.add("b.txt", "bee");
  corpus_.add("a.jsonl.gz", gzipped("{\"text\":\"one\"}\n{\"text\":\"three\"}\n"));
  corpus_.add("c.md.zst", zstd_compressed("sea"));
  for (const int threads : {1, 3, 16}) {
    const TextIndex index = build(threads);
    EXPECT_THAT(hashes(index), ElementsAre(hash("one"), hash("three"), hash("bee"), hash("sea")));
    ASSERT_EQ(index.files.size(), 3u);
    EXPECT_EQ(index.files[0].documents, 2u);
    EXPECT_EQ(index.files[0].stored_tokens, 8);
    EXPECT_EQ(index.files[1].first_document, 2u);
    EXPECT_EQ(index.text_bytes, 14);
    EXPECT_TRUE(index.skipped.empty());
  }
}

TEST_F(TextIndexTest, NamesAndSkipsBadFilesAndGoesOn) {
  const std::string whole = gzipped(some_text(50'000, 1));
  corpus_.add("a-good.txt", "good");
  corpus_.add("b-torn.txt.gz", whole.substr(0, whole.size() / 2));
  corpus_.add("c-empty.txt", "");
  corpus_.add("d-corrupt.txt.zst", "not zstd at all");
  corpus_.add("e-lines.jsonl", "{\"text\":\"kept\"}\nrubbish\n{}\n");
  corpus_.add("f-useless.jsonl", "rubbish\n");
  for (int start = 0; start < 2; ++start) {  // the second takes them from the cache
    const TextIndex index = build();
    EXPECT_THAT(hashes(index), ElementsAre(hash("good"), hash("kept")));
    std::vector<std::string> skipped;
    for (const auto& file : index.skipped) skipped.push_back(file.path + " " + file.why);
    EXPECT_THAT(skipped,
                ElementsAre(corpus_.path("b-torn.txt.gz") + " is truncated (gzip)",
                            corpus_.path("c-empty.txt") + " is empty",
                            HasSubstr("d-corrupt.txt.zst is corrupt (zstd: "),
                            HasSubstr("f-useless.jsonl has no usable line; line 1: not a JSON")));
    ASSERT_EQ(index.partly_used.size(), 1u);
    EXPECT_EQ(index.partly_used[0].path, corpus_.path("e-lines.jsonl"));
    EXPECT_THAT(index.partly_used[0].why, HasSubstr("2 bad lines left out; line 2: not a JSON"));
    EXPECT_EQ(index.files_read, start == 0 ? 6u : 0u);
  }
}

TEST_F(TextIndexTest, ReadsAgainOnlyWhatHasChanged) {
  corpus_.add("a.txt", "aaa");
  corpus_.add("b.txt", "bbb");
  corpus_.add("c.txt", "ccc");
  EXPECT_EQ(build().files_read, 3u);
  EXPECT_EQ(build().files_read, 0u);
  EXPECT_EQ(build().files_cached, 3u);

  corpus_.add("b.txt", "BBB");  // same size, another time
  const timespec times[2] = {{1'000'000, 0}, {1'000'000, 5}};
  ASSERT_EQ(::utimensat(AT_FDCWD, corpus_.path("b.txt").c_str(), times, 0), 0);
  corpus_.add("d.txt", "ddd");
  std::filesystem::remove(corpus_.path("a.txt"));
  const TextIndex index = build();
  EXPECT_EQ(index.files_read, 2u);
  EXPECT_THAT(hashes(index), ElementsAre(hash("BBB"), hash("ccc"), hash("ddd")));

  // Another file under the same name, size and time: the inode gives it away.
  corpus_.add("swap", "EEE");
  ASSERT_EQ(::utimensat(AT_FDCWD, corpus_.path("swap").c_str(), times, 0), 0);
  std::filesystem::rename(corpus_.path("swap"), corpus_.path("b.txt"));
  EXPECT_THAT(hashes(build()), ElementsAre(hash("EEE"), hash("ccc"), hash("ddd")));
}

TEST_F(TextIndexTest, BuildsACorruptCacheAnew) {
  corpus_.add("a.txt", "aaa");
  build();
  std::ofstream(cache_file(), std::ios::binary | std::ios::in) << "MUSTER-INDEX-0\n";
  const TextIndex index = build();
  EXPECT_EQ(index.files_read, 1u);
  EXPECT_THAT(hashes(index), ElementsAre(hash("aaa")));
  EXPECT_EQ(build().files_read, 0u) << "and it is whole again";
}

TEST_F(TextIndexTest, TriesAnUnreadableFileAgainNextTime) {
  corpus_.add("a.txt", "aaa");
  corpus_.add("b.txt", "bbb");
  ASSERT_EQ(::chmod(corpus_.path("b.txt").c_str(), 0), 0);
  expect_as_unprivileged_user([this] {
    const TextIndex index = build();
    ASSERT_EQ(index.skipped.size(), 1u);
    EXPECT_EQ(index.skipped[0].path, corpus_.path("b.txt"));
    EXPECT_THAT(index.skipped[0].why, HasSubstr("cannot be opened: Permission denied"));
    EXPECT_THAT(hashes(index), ElementsAre(hash("aaa")));
  });
  ASSERT_EQ(::chmod(corpus_.path("b.txt").c_str(), 0644), 0);  // size, mtime and inode stay
  const TextIndex index = build();
  EXPECT_EQ(index.files_cached, 1u);
  EXPECT_THAT(hashes(index), ElementsAre(hash("aaa"), hash("bbb")));
}

TEST_F(TextIndexTest, RefusesACorpusWithoutText) {
  corpus_.add("a.txt", "");
  corpus_.add("b.txt.gz", "x");
  EXPECT_THAT(error_of<DataError>([&] { build(); }),
              testing::AllOf(HasSubstr("hold no text: 2 text files"), HasSubstr("a.txt is empty")));
}

TEST_F(TextIndexTest, StopsWhenAsked) {
  corpus_.add("a.txt", "aaa");
  std::stop_source stop;
  stop.request_stop();
  EXPECT_THAT(error_of<Error>([&] {
                build_text_index({corpus_.path()}, *tokenizer_, cache_.path(), 2, stop.get_token());
              }),
              HasSubstr("stopped"));
}

}  // namespace
}  // namespace muster
