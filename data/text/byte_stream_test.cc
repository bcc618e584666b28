#include "data/text/byte_stream.h"

#include <sys/stat.h>

#include <algorithm>

#include "data/testing.h"

namespace muster {
namespace {

std::string read_all(const std::string& path, Compression compression, size_t at_once) {
  const auto stream = open_stream(path, compression);
  std::string all;
  std::string part(at_once, '\0');
  while (const size_t got = stream->read(part.data(), part.size())) all.append(part, 0, got);
  EXPECT_EQ(stream->read(part.data(), part.size()), 0u) << "the end stays the end";
  return all;
}

// Sizes around the 64 KiB input buffer, incompressible and very compressible.
std::vector<std::string> texts() {
  std::string noise(300'000, '\0');
  uint32_t state = 7;
  for (char& c : noise) c = static_cast<char>((state = state * 1664525u + 1013904223u) >> 24);
  return {"x", some_text(1000, 1), std::string(1 << 20, 'a'), noise};
}

TEST(ByteStream, ReadsWhatWasCompressedWhateverTheSizeOfTheReads) {
  const Corpus corpus;
  for (const std::string& text : texts()) {
    corpus.add("plain", text);
    corpus.add("gz", gzipped(text));
    corpus.add("zst", zstd_compressed(text));
    for (const size_t at_once : {size_t{977}, size_t{1} << 16, size_t{1} << 21}) {
      EXPECT_EQ(read_all(corpus.path("plain"), Compression::kNone, at_once), text);
      EXPECT_EQ(read_all(corpus.path("gz"), Compression::kGzip, at_once), text);
      EXPECT_EQ(read_all(corpus.path("zst"), Compression::kZstd, at_once), text);
    }
  }
}

TEST(ByteStream, ReadsSeveralMembersAsOneAndIgnoresPaddingAfterThem) {
  const Corpus corpus;
  corpus.add("gz", gzipped("one ") + gzipped("two") + std::string(512, '\0'));
  corpus.add("zst", zstd_compressed("one ") + zstd_compressed("two"));
  EXPECT_EQ(read_all(corpus.path("gz"), Compression::kGzip, 100), "one two");
  EXPECT_EQ(read_all(corpus.path("zst"), Compression::kZstd, 100), "one two");
}

TEST(ByteStream, SaysThatAStreamIsTruncatedWhereverItIsCut) {
  const Corpus corpus;
  const std::string text = some_text(100'000, 3);
  for (const auto& [whole, kind] : {std::pair{gzipped(text), Compression::kGzip},
                                    std::pair{zstd_compressed(text), Compression::kZstd}}) {
    for (const size_t keep :
         {size_t{1}, size_t{5}, size_t{20}, whole.size() / 2, whole.size() - 1}) {
      corpus.add("cut", whole.substr(0, keep));
      EXPECT_THAT(error_of<DataError>([&, k = kind] { read_all(corpus.path("cut"), k, 4096); }),
                  testing::HasSubstr("is truncated"))
          << keep;
    }
    corpus.add("cut", "");
    EXPECT_EQ(read_all(corpus.path("cut"), kind, 4096), "") << "no bytes at all: empty, not torn";
  }
}

TEST(ByteStream, SaysThatAStreamIsCorrupt) {
  const Corpus corpus;
  const std::string text = some_text(100'000, 3);
  for (auto [bytes, kind] : {std::pair{gzipped(text), Compression::kGzip},
                             std::pair{zstd_compressed(text), Compression::kZstd}}) {
    corpus.add("text", "this was never compressed");
    EXPECT_THAT(error_of<DataError>([&, k = kind] { read_all(corpus.path("text"), k, 4096); }),
                testing::HasSubstr("is corrupt"));
    if (kind == Compression::kGzip) {  // zstd's check sum is optional, and absent here
      bytes[bytes.size() / 2] ^= 0x10;
      corpus.add("flip", bytes);
      EXPECT_THAT(error_of<DataError>([&, k = kind] { read_all(corpus.path("flip"), k, 4096); }),
                  testing::HasSubstr("is corrupt"));
    }
  }
}

TEST(ByteStream, RefusesWhatIsNoFile) {
  const Corpus corpus;
  ASSERT_EQ(::mkfifo(corpus.path("fifo").c_str(), 0600), 0);
  EXPECT_THAT(error_of<IoError>([&] { open_stream(corpus.path("none"), Compression::kNone); }),
              testing::HasSubstr("No such file"));
  EXPECT_THAT(error_of<IoError>([&] { open_stream(corpus.path("fifo"), Compression::kNone); }),
              testing::HasSubstr("not a regular file"));
  EXPECT_THAT(error_of<IoError>([&] { open_stream(corpus.path(), Compression::kGzip); }),
              testing::HasSubstr("not a regular file"));
}

}  // namespace
}  // namespace muster
