#include "data/text/document_reader.h"

#include "data/testing.h"

namespace muster {
namespace {

class Gather : public DocumentSink {
 public:
  void piece(std::string_view text) override {
    EXPECT_FALSE(text.empty());
    open_ += text;
  }
  void end_document() override { documents.push_back(std::exchange(open_, "")); }
  std::vector<std::string> documents;

 private:
  std::string open_;
};

TEST(DocumentReader, TakesATextFileAsOneDocumentByteByByte) {
  const Corpus corpus;
  const std::string bytes =
      "not UTF-8: \xff\xfe\x80, a NUL: " + std::string(1, '\0') + some_text(500'000, 1);
  corpus.add("a.txt", bytes);
  corpus.add("a.txt.gz", gzipped(bytes));
  corpus.add("empty.txt", "");
  for (const char* name : {"a.txt", "a.txt.gz"}) {
    Gather gather;
    EXPECT_EQ(read_documents(corpus.path(name), *text_format(name), gather).bad_lines, 0);
    EXPECT_EQ(gather.documents, std::vector{bytes}) << name;
  }
  Gather gather;
  read_documents(corpus.path("empty.txt"), *text_format("empty.txt"), gather);
  EXPECT_TRUE(gather.documents.empty());
}

TEST(DocumentReader, TakesALineOfJsonAsADocument) {
  const Corpus corpus;
  const std::string big = some_text(400'000, 2);  // longer than a chunk
  std::string clean = big;
  for (char& c : clean) c = c == '\n' ? ' ' : c;
  const std::string lines = "{\"text\":\"one\"}\n\n  \r\n{\"text\":\"" + clean +
                            "\"}\r\nrubbish\n{\"title\":\"none\"}\n{\"text\":\"last\"}";
  corpus.add("a.jsonl", lines);
  corpus.add("a.jsonl.zst", zstd_compressed(lines));
  for (const char* name : {"a.jsonl", "a.jsonl.zst"}) {
    Gather gather;
    const ReadReport report = read_documents(corpus.path(name), *text_format(name), gather);
    EXPECT_EQ(gather.documents, (std::vector<std::string>{"one", clean, "last"}));
    EXPECT_EQ(report.bad_lines, 2);
    EXPECT_EQ(report.first_bad, "line 5: not a JSON object");
  }
}

TEST(DocumentReader, LeavesOutALineThatIsTooLongAndGoesOn) {
  const Corpus corpus;
  // Two copies of it do not fit the limit of a line; neither has to fit in memory.
  corpus.add("a.jsonl.zst", zstd_compressed("{\"text\":\"" + std::string(65 << 20, 'x') +
                                            "\"}\n{\"text\":\"after\"}\n"));
  Gather gather;
  const auto report =
      read_documents(corpus.path("a.jsonl.zst"), *text_format("a.jsonl.zst"), gather);
  EXPECT_EQ(gather.documents, std::vector<std::string>{"after"});
  EXPECT_EQ(report.first_bad, "line 1: longer than 64 MiB");
}

}  // namespace
}  // namespace muster
