#include "data/token_file.h"

#include "data/testing.h"

namespace muster {
namespace {

constexpr int64_t kInMemory = 1 << 30;
constexpr int64_t kOnDisk = 1000;

class TokenFileTest : public testing::Test {
 protected:
  TokenFileTest() {
    corpus_.add("a.txt", text_);
    corpus_.add("b.txt.gz", gzipped(text_));
    corpus_.add("c.jsonl.zst", zstd_compressed("{\"text\":\"one\"}\n{\"text\":\"two\"}\n"));
    index_ = build_text_index({corpus_.path()}, *tokenizer_, cache_.path("index"), 1);
  }
  std::unique_ptr<TokenFile> open(size_t file, int64_t memory_limit) const {
    return open_token_file(index_.files[file], *tokenizer_, memory_limit, cache_.path("spill"));
  }
  static std::string read(const TokenFile& file, int64_t first, int64_t count) {
    std::vector<int32_t> ids(static_cast<size_t>(count));
    file.read(first, count, ids.data());
    return {ids.begin(), ids.end()};
  }

  const std::string text_ = some_text(100'000, 1) + "\xff";
  Corpus corpus_;
  Corpus cache_;
  std::unique_ptr<Tokenizer> tokenizer_ = make_tokenizer("bytes");
  TextIndex index_;
};

TEST_F(TokenFileTest, ReadsTheSameFromMemoryFromTheFileAndFromASpill) {
  for (const size_t file : {0, 1}) {
    for (const int64_t limit : {kInMemory, kOnDisk}) {
      const auto tokens = open(file, limit);
      EXPECT_EQ(read(*tokens, 0, 100'001), text_) << file << " " << limit;
      EXPECT_EQ(read(*tokens, 99'990, 11), text_.substr(99'990));
      EXPECT_EQ(read(*tokens, 5, 0), "");
      int32_t last = 0;
      tokens->read(100'000, 1, &last);
      EXPECT_EQ(last, 255) << "bytes are not signed";
    }
  }
  EXPECT_EQ(read(*open(2, kInMemory), 0, 6), "onetwo");
  EXPECT_EQ(read(*open(2, 2), 2, 3), "etw");
}

TEST_F(TokenFileTest, LeavesNoSpilledFileBehind) {
  const auto tokens = open(1, kOnDisk);
  EXPECT_EQ(read(*tokens, 0, 10), text_.substr(0, 10));
  EXPECT_TRUE(std::filesystem::is_empty(cache_.path("spill"))) << "it never has a name";
}

TEST_F(TokenFileTest, NamesAFileThatHasChanged) {
  const auto open_disk = open(0, kOnDisk);
  corpus_.add("a.txt", "something else");
  corpus_.add("b.txt.gz", gzipped("something else"));
  for (const size_t file : {0, 1}) {
    for (const int64_t limit : {kInMemory, kOnDisk}) {
      EXPECT_THAT(error_of<DataError>([&] { open(file, limit); }),
                  testing::HasSubstr(index_.files[file].source.path + " has changed since"));
    }
  }
  EXPECT_THAT(error_of<DataError>([&] { read(*open_disk, 50'000, 10); }),
              testing::HasSubstr("a.txt has changed since"));
  const std::string torn = gzipped(text_);
  corpus_.add("b.txt.gz", torn.substr(0, torn.size() - 9));
  EXPECT_THAT(error_of<DataError>([&] { open(1, kInMemory); }),
              testing::HasSubstr("b.txt.gz has changed since"));
  std::filesystem::remove(corpus_.path("b.txt.gz"));
  EXPECT_THAT(error_of<IoError>([&] { open(1, kInMemory); }),
              testing::HasSubstr("b.txt.gz cannot be opened: No such file"));
}

}  // namespace
}  // namespace muster
