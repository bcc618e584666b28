#include "data/token_stream.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

TEST(TokenStream, FindsTheDocumentOfEachToken) {
  TokenStream stream;
  stream.append(4, 1);
  stream.append(7, 3);
  stream.append(9, 2);
  EXPECT_EQ(stream.tokens(), 6);
  const std::vector<uint32_t> expected = {4, 7, 7, 7, 9, 9};
  for (int64_t token = 0; token < 6; ++token) {
    const size_t i = stream.find(token);
    EXPECT_EQ(stream.document(i), expected[static_cast<size_t>(token)]);
    EXPECT_LE(stream.begin(i), token);
    EXPECT_GT(stream.end(i), token);
  }
}

TEST(TokenStream, ASampleNeedsOneTokenMoreThanItsInputs) {
  TokenStream stream;
  EXPECT_EQ(stream.samples(4), 0);
  stream.append(0, 4);
  EXPECT_EQ(stream.samples(4), 0);
  stream.append(1, 1);
  EXPECT_EQ(stream.samples(4), 1);
  stream.append(2, 3);
  EXPECT_EQ(stream.samples(4), 1);
  stream.append(3, 1);
  EXPECT_EQ(stream.samples(4), 2);
  EXPECT_EQ(stream.samples(1), 8);
}

}  // namespace
}  // namespace muster
