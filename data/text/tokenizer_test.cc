#include "data/text/tokenizer.h"

#include "data/testing.h"

namespace muster {
namespace {

TEST(Tokenizer, BytesAreTheirOwnIds) {
  const auto tokenizer = make_tokenizer("bytes");
  EXPECT_EQ(tokenizer->vocab_size(), 257);
  EXPECT_EQ(tokenizer->end_of_document(), 256);
  EXPECT_EQ(tokenizer->token_bytes(), 1);
  std::string stored = "before ";
  tokenizer->encode("\xff\x01", stored);
  EXPECT_EQ(stored, "before \xff\x01");
  EXPECT_EQ(tokenizer->decode(0xff), "\xff");
  EXPECT_EQ(tokenizer->decode(0), std::string(1, '\0'));
  EXPECT_EQ(tokenizer->decode(256), "");
  EXPECT_EQ(tokenizer->decode(257), "");
  EXPECT_EQ(tokenizer->decode(0xff), "\xff");
  EXPECT_EQ(tokenizer->decode(0), std::string(1, '\0'));
  EXPECT_EQ(tokenizer->decode(256), "");
}

TEST(Tokenizer, RefusesAnUnknownName) {
  EXPECT_THAT(error_of<ConfigError>([] { make_tokenizer("gpt9"); }),
              testing::AllOf(testing::HasSubstr("data.tokenizer"), testing::HasSubstr("gpt9")));
}

}  // namespace
}  // namespace muster
