#include "data/file_cache.h"

#include <atomic>
#include <thread>

#include "data/testing.h"

namespace muster {
namespace {

constexpr int kFiles = 8;
constexpr int64_t kFileBytes = 1000;

class FileCacheTest : public testing::Test {
 protected:
  FileCacheTest() {
    for (int i = 0; i < kFiles; ++i) {
      corpus_.add("f" + std::to_string(i) + ".txt.gz",
                  gzipped(std::string(kFileBytes, static_cast<char>('a' + i))));
    }
    corpus_.add("huge.txt.gz", gzipped(std::string(50 * kFileBytes, 'z')));
    index_ = build_text_index({corpus_.path()}, *tokenizer_, cache_dir_.path(), 2);
  }
  static char letter(const TokenFile& file) {
    int32_t id = 0;
    file.read(kFileBytes - 1, 1, &id);
    return static_cast<char>(id);
  }

  Corpus corpus_;
  Corpus cache_dir_;
  std::unique_ptr<Tokenizer> tokenizer_ = make_tokenizer("bytes");
  TextIndex index_;
};

TEST_F(FileCacheTest, KeepsTheMostRecentlyUsedWithinItsBudget) {
  FileCache cache(index_, *tokenizer_, 4 * kFileBytes, cache_dir_.path());
  for (const size_t file : {0, 1, 2, 3, 0}) EXPECT_EQ(letter(*cache.get(file)), 'a' + file);
  EXPECT_EQ(cache.decoded_files(), 4);
  EXPECT_EQ(cache.bytes(), 4 * kFileBytes);
  cache.get(4);  // in the place of 1, the one not used for longest
  cache.get(0);
  EXPECT_EQ(cache.decoded_files(), 5);
  cache.get(1);
  EXPECT_EQ(cache.decoded_files(), 6);
  EXPECT_LE(cache.bytes(), 4 * kFileBytes);
}

TEST_F(FileCacheTest, ServesAFileLargerThanTheWholeCache) {
  FileCache cache(index_, *tokenizer_, 4 * kFileBytes, cache_dir_.path());
  for (int round = 0; round < 3; ++round) {
    EXPECT_EQ(letter(*cache.get(kFiles)), 'z');
    EXPECT_EQ(letter(*cache.get(1)), 'b');
  }
  EXPECT_EQ(cache.decoded_files(), 2) << "it stays open, on disk";
  EXPECT_LE(cache.bytes(), 4 * kFileBytes);
}

TEST_F(FileCacheTest, WorksWithoutAnyRoom) {
  FileCache cache(index_, *tokenizer_, 0, cache_dir_.path());
  for (const size_t file : {3, 3, 5}) EXPECT_EQ(letter(*cache.get(file)), 'a' + file);
  EXPECT_EQ(cache.bytes(), 0);
}

TEST_F(FileCacheTest, AnEvictedFileLivesOnForItsHolder) {
  FileCache cache(index_, *tokenizer_, 4 * kFileBytes, cache_dir_.path());
  const auto held = cache.get(0);
  for (const size_t file : {1, 2, 3, 4}) cache.get(file);
  EXPECT_EQ(letter(*held), 'a');
}

TEST_F(FileCacheTest, ThreadsShareOneDecoding) {
  FileCache cache(index_, *tokenizer_, 40 * kFileBytes, cache_dir_.path());
  std::atomic<int> wrong{0};
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < 200; ++i) {
          const size_t file = static_cast<size_t>(i * 7 + t) % kFiles;
          if (letter(*cache.get(file)) != static_cast<char>('a' + file)) ++wrong;
        }
      });
    }
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(cache.decoded_files(), kFiles);
}

TEST_F(FileCacheTest, ThreadsCompeteForATinyCache) {
  FileCache cache(index_, *tokenizer_, 4 * kFileBytes, cache_dir_.path());
  std::atomic<int> wrong{0};
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < 100; ++i) {
          const size_t file = static_cast<size_t>(i * 5 + t * 3) % kFiles;
          if (letter(*cache.get(file)) != static_cast<char>('a' + file)) ++wrong;
        }
      });
    }
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_LE(cache.bytes(), 4 * kFileBytes);
}

TEST_F(FileCacheTest, TriesAgainAfterAFailure) {
  FileCache cache(index_, *tokenizer_, 40 * kFileBytes, cache_dir_.path());
  const std::string path = corpus_.path("f2.txt.gz");
  std::filesystem::rename(path, path + ".away");
  EXPECT_THROW(cache.get(2), IoError);
  EXPECT_EQ(cache.bytes(), 0);
  std::filesystem::rename(path + ".away", path);
  EXPECT_EQ(letter(*cache.get(2)), 'c');
}

}  // namespace
}  // namespace muster
