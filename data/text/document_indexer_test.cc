#include "data/text/document_indexer.h"

#include "common/hash.h"
#include "data/testing.h"

namespace muster {
namespace {

// Two bytes of a document make one token of two stored bytes; a last odd byte makes one too.
class PairTokenizer : public Tokenizer {
 public:
  std::string name() const override { return "pairs"; }
  int32_t vocab_size() const override { return 65536; }
  int32_t end_of_document() const override { return 0; }
  int token_bytes() const override { return 2; }
  bool is_identity() const override { return false; }
  void encode(std::string_view text, std::string& stored) const override {
    stored.append(text);
    if (text.size() % 2 == 1) stored += '\0';
  }
  std::string decode(int32_t token) const override {
    return {static_cast<char>(token), static_cast<char>(token >> 8)};
  }
};

TEST(DocumentIndexer, FindsOffsetsLengthsAndHashesWhateverThePieces) {
  const auto tokenizer = make_tokenizer("bytes");
  std::string stored;
  DocumentIndexer indexer(*tokenizer, [&](std::string_view part) { stored += part; });
  indexer.piece("hel");
  indexer.piece("lo");
  indexer.end_document();
  indexer.piece("x");
  indexer.end_document();
  ASSERT_EQ(indexer.documents().size(), 2u);
  const IndexedDocument& first = indexer.documents()[0];
  const IndexedDocument& second = indexer.documents()[1];
  EXPECT_EQ(first.offset, 0);
  EXPECT_EQ(first.tokens, 6) << "five bytes and the end";
  EXPECT_EQ(first.hash, xxh3("hello", 5));
  EXPECT_EQ(second.offset, 5) << "the end is not stored";
  EXPECT_EQ(second.tokens, 2);
  EXPECT_EQ(second.hash, xxh3("x", 1));
  EXPECT_EQ(stored, "hellox");
  EXPECT_EQ(indexer.stored_tokens(), 6);
  EXPECT_EQ(indexer.text_bytes(), 6);
}

TEST(DocumentIndexer, HandsDocumentsWholeToATokenizerThatNeedsThat) {
  const PairTokenizer tokenizer;
  std::string stored;
  DocumentIndexer indexer(tokenizer, [&](std::string_view part) { stored += part; });
  indexer.piece("a");
  indexer.piece("bc");  // cut elsewhere than tokens are
  indexer.end_document();
  indexer.piece("de");
  indexer.end_document();
  EXPECT_EQ(stored, std::string("abc\0de", 6));
  EXPECT_EQ(indexer.documents()[0].tokens, 3);
  EXPECT_EQ(indexer.documents()[1].offset, 2);
  EXPECT_EQ(indexer.documents()[1].tokens, 2);
  EXPECT_EQ(indexer.stored_tokens(), 3);
  EXPECT_EQ(indexer.text_bytes(), 5);
}

TEST(DocumentIndexer, StopsWhenAsked) {
  const auto tokenizer = make_tokenizer("bytes");
  std::stop_source stop;
  DocumentIndexer indexer(*tokenizer, {}, stop.get_token());
  indexer.piece("fine");
  stop.request_stop();
  EXPECT_THROW(indexer.piece("late"), Error);
}

TEST(DocumentIndexer, DigestTellsDocumentsApart) {
  const std::vector<IndexedDocument> a = {{0, 3, 7}, {2, 4, 9}};
  std::vector<IndexedDocument> b = a;
  EXPECT_EQ(digest_of(a.data(), 2), digest_of(b.data(), 2));
  EXPECT_NE(digest_of(a.data(), 2), digest_of(a.data(), 1));
  b[1].hash = 10;
  EXPECT_NE(digest_of(a.data(), 2), digest_of(b.data(), 2));
  b = {a[1], a[0]};
  EXPECT_NE(digest_of(a.data(), 2), digest_of(b.data(), 2));
}

}  // namespace
}  // namespace muster
