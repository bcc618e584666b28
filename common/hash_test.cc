#include "common/hash.h"

#include <gtest/gtest.h>

#include <string>

#include "common/error.h"
#include "common/files.h"

namespace muster {
namespace {

TEST(HashTest, KnownAnswers) {
  // XXH3's value of the empty input, from the specification's test vectors.
  EXPECT_EQ(xxh3("", 0), 0x2d06800538d394c2u);
  EXPECT_EQ(to_hex(xxh3("", 0)), "2d06800538d394c2");
  EXPECT_EQ(to_hex(1), "0000000000000001");
}

TEST(HashTest, PiecesGiveTheSameAsTheWhole) {
  std::string text(3 << 20, 'a');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 131 >> 7);
  const uint64_t whole = xxh3(text.data(), text.size());
  Xxh3 hash;
  for (size_t at = 0, step = 1; at < text.size(); at += step, step = step * 3 + 1) {
    step = std::min(step, text.size() - at);
    hash.update(text.data() + at, step);
  }
  EXPECT_EQ(hash.digest(), whole);

  const TempDir dir;
  write_file_atomic(dir.path() + "/file", text);
  EXPECT_EQ(xxh3_file(dir.path() + "/file"), whole);
  text[1 << 20] ^= 1;
  EXPECT_NE(xxh3(text.data(), text.size()), whole);
  EXPECT_THROW(xxh3_file(dir.path() + "/none"), IoError);
}

}  // namespace
}  // namespace muster
