#include "data/text/document_reader.h"

#include <cstring>
#include <vector>

#include "data/text/byte_stream.h"
#include "data/text/json_text.h"

namespace muster {
namespace {

constexpr size_t kChunkBytes = 128 << 10;
constexpr size_t kMaxLineBytes = 64 << 20;

class LineParser {
 public:
  LineParser(DocumentSink& sink, ReadReport& report) : sink_(sink), report_(report) {}

  void feed(std::string_view bytes) {
    while (!bytes.empty()) {
      const size_t newline = bytes.find('\n');
      const std::string_view part = bytes.substr(0, newline);
      if (newline != std::string_view::npos && held_.empty() && !overlong_) {
        line(part);  // a whole line inside the chunk: no copy
      } else {
        hold(part);
        if (newline != std::string_view::npos) finish_held();
      }
      bytes.remove_prefix(newline == std::string_view::npos ? bytes.size() : newline + 1);
    }
  }
  void finish() {
    if (!held_.empty() || overlong_) finish_held();
  }

 private:
  void hold(std::string_view part) {
    if (overlong_ || held_.size() + part.size() > kMaxLineBytes) {
      overlong_ = true;
      held_.clear();
    } else {
      held_.append(part);
    }
  }
  void finish_held() {
    if (overlong_) {
      ++number_;
      bad("longer than 64 MiB");
    } else {
      line(held_);
    }
    overlong_ = false;
    held_.clear();
  }
  void line(std::string_view text) {
    ++number_;
    if (text.find_first_not_of(" \t\r") == std::string_view::npos) return;
    if (const char* why = parse_json_text(text, document_)) {
      bad(why);
      return;
    }
    sink_.piece(document_);
    sink_.end_document();
  }
  void bad(const char* why) {
    if (report_.bad_lines++ == 0) {
      report_.first_bad = "line " + std::to_string(number_) + ": " + why;
    }
  }

  DocumentSink& sink_;
  ReadReport& report_;
  std::string held_;  // the beginning of a line whose end is not read yet
  std::string document_;
  int64_t number_ = 0;
  bool overlong_ = false;
};

}  // namespace

ReadReport read_documents(const std::string& path, TextFormat format, DocumentSink& sink) {
  ReadReport report;
  const auto stream = open_stream(path, format.compression);
  LineParser lines(sink, report);
  std::vector<char> chunk(kChunkBytes);
  bool any = false;
  while (const size_t got = stream->read(chunk.data(), chunk.size())) {
    const std::string_view bytes(chunk.data(), got);
    if (format.json_lines) {
      lines.feed(bytes);
    } else {
      sink.piece(bytes);
    }
    any = true;
  }
  if (format.json_lines) {
    lines.finish();
  } else if (any) {
    sink.end_document();
  }
  return report;
}

}  // namespace muster
