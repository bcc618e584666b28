#include "data/text/index_cache.h"

#include <sys/stat.h>

#include "common/logging.h"
#include "data/testing.h"

namespace muster {
namespace {

FileRecords some_records() {
  FileRecords records;
  records["/corpus/a.txt"] = {10, -5, 77, "", 0, "", 9, {{0, 10, 123}}};
  records["/corpus/b.jsonl"] = {
      2000, 1, 78, "", 2, "line 3: no \"text\"", 8, {{0, 5, 1}, {4, 5, 2}}};
  records["/corpus/c.gz"] = {30, 1, 79, "is truncated (gzip)", 0, "", 0, {}};
  return records;
}

void expect_equal(const FileRecords& a, const FileRecords& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [path, record] : a) {
    ASSERT_TRUE(b.contains(path)) << path;
    const FileRecord& other = b.at(path);
    EXPECT_EQ(record.size, other.size);
    EXPECT_EQ(record.mtime_ns, other.mtime_ns);
    EXPECT_EQ(record.inode, other.inode);
    EXPECT_EQ(record.failure, other.failure);
    EXPECT_EQ(record.bad_lines, other.bad_lines);
    EXPECT_EQ(record.first_bad, other.first_bad);
    EXPECT_EQ(record.text_bytes, other.text_bytes);
    ASSERT_EQ(record.documents.size(), other.documents.size());
    for (size_t i = 0; i < record.documents.size(); ++i) {
      EXPECT_EQ(record.documents[i].offset, other.documents[i].offset);
      EXPECT_EQ(record.documents[i].tokens, other.documents[i].tokens);
      EXPECT_EQ(record.documents[i].hash, other.documents[i].hash);
    }
  }
}

TEST(IndexCache, ComesBackAsItWasSaved) {
  const Corpus dir;
  const std::string path = dir.path("made/on/demand/index");
  EXPECT_TRUE(load_index_cache(path).empty());
  save_index_cache(path, some_records());
  expect_equal(load_index_cache(path), some_records());
  save_index_cache(path, {});
  EXPECT_TRUE(load_index_cache(path).empty());
}

TEST(IndexCache, IsEmptyWhenAnyByteIsWrongOrMissing) {
  const Corpus dir;
  save_index_cache(dir.path("index"), some_records());
  const std::string good = read_file(dir.path("index"));
  const auto level = spdlog::get_level();
  spdlog::set_level(spdlog::level::off);  // hundreds of "is built anew"
  for (size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] ^= 1;
    dir.add("bad", bad);
    EXPECT_TRUE(load_index_cache(dir.path("bad")).empty()) << "byte " << i;
  }
  for (size_t keep = 0; keep < good.size(); ++keep) {
    dir.add("bad", good.substr(0, keep));
    EXPECT_TRUE(load_index_cache(dir.path("bad")).empty()) << "first " << keep << " bytes";
  }
  spdlog::set_level(level);
}

TEST(IndexCache, ThatCannotBeWrittenIsNoError) {
  const Corpus dir;
  dir.add("file", "in the way");
  save_index_cache(dir.path("file/index"), some_records());
  EXPECT_TRUE(load_index_cache(dir.path("file/index")).empty());
}

TEST(IndexCache, HasANameForEachListOfSources) {
  const auto tokenizer = make_tokenizer("bytes");
  const auto name = [&](const std::vector<std::string>& sources) {
    return index_cache_path("/cache", sources, *tokenizer);
  };
  EXPECT_TRUE(name({"/a"}).starts_with("/cache/index-"));
  EXPECT_EQ(name({"/a", "/b"}), name({"/x/../a", "/b"}));
  EXPECT_NE(name({"/a", "/b"}), name({"/b", "/a"}));
  EXPECT_NE(name({"/a", "/b"}), name({"/a/b"}));
}

}  // namespace
}  // namespace muster
