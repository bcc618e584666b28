#include "data/text/json_text.h"

#include <cstdint>

namespace muster {
namespace {

constexpr int kMaxDepth = 128;

void append_utf8(std::string& out, uint32_t code) {
  if (code < 0x80) {
    out += static_cast<char>(code);
  } else if (code < 0x800) {
    out += static_cast<char>(0xC0 | code >> 6);
    out += static_cast<char>(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    out += static_cast<char>(0xE0 | code >> 12);
    out += static_cast<char>(0x80 | (code >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (code & 0x3F));
  } else {
    out += static_cast<char>(0xF0 | code >> 18);
    out += static_cast<char>(0x80 | (code >> 12 & 0x3F));
    out += static_cast<char>(0x80 | (code >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (code & 0x3F));
  }
}

// A cursor over the line. Every method returns false at the first thing that is not JSON.
class Parser {
 public:
  explicit Parser(std::string_view line) : at_(line.data()), end_(line.data() + line.size()) {}

  bool at_end() {
    skip_space();
    return at_ == end_;
  }
  bool take(char c) {
    skip_space();
    if (at_ == end_ || *at_ != c) return false;
    ++at_;
    return true;
  }
  bool peek(char c) {
    skip_space();
    return at_ != end_ && *at_ == c;
  }

  // Appends the decoded string to `out`, or only checks it when `out` is null.
  bool string(std::string* out) {
    if (!take('"')) return false;
    while (true) {
      const char* run = at_;
      while (at_ != end_ && *at_ != '"' && *at_ != '\\' && static_cast<unsigned char>(*at_) >= 0x20)
        ++at_;
      if (out != nullptr) out->append(run, at_);
      if (at_ == end_) return false;
      const char c = *at_++;
      if (c == '"') return true;
      if (c != '\\' || !escape(out)) return false;
    }
  }

  bool value(int depth) {
    if (depth > kMaxDepth) return false;
    skip_space();
    if (at_ == end_) return false;
    switch (*at_) {
      case '"':
        return string(nullptr);
      case '{':
        return object(depth);
      case '[':
        return array(depth);
      case 't':
        return word("true");
      case 'f':
        return word("false");
      case 'n':
        return word("null");
      default:
        return number();
    }
  }

 private:
  void skip_space() {
    while (at_ != end_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\r' || *at_ == '\n')) ++at_;
  }
  bool word(std::string_view expected) {
    if (!std::string_view(at_, end_).starts_with(expected)) return false;
    at_ += expected.size();
    return true;
  }
  bool digits() {
    const char* begin = at_;
    while (at_ != end_ && *at_ >= '0' && *at_ <= '9') ++at_;
    return at_ != begin;
  }
  bool number() {
    if (at_ != end_ && *at_ == '-') ++at_;
    if (at_ != end_ && *at_ == '0') {
      ++at_;
    } else if (!digits()) {
      return false;
    }
    if (at_ != end_ && *at_ == '.') {
      ++at_;
      if (!digits()) return false;
    }
    if (at_ != end_ && (*at_ == 'e' || *at_ == 'E')) {
      ++at_;
      if (at_ != end_ && (*at_ == '+' || *at_ == '-')) ++at_;
      if (!digits()) return false;
    }
    return true;
  }
  bool array(int depth) {
    take('[');
    if (take(']')) return true;
    do {
      if (!value(depth + 1)) return false;
    } while (take(','));
    return take(']');
  }
  bool object(int depth) {
    take('{');
    if (take('}')) return true;
    do {
      if (!string(nullptr) || !take(':') || !value(depth + 1)) return false;
    } while (take(','));
    return take('}');
  }
  bool hex4(uint32_t& code) {
    if (end_ - at_ < 4) return false;
    code = 0;
    for (int i = 0; i < 4; ++i) {
      const char c = *at_++;
      code <<= 4;
      if (c >= '0' && c <= '9') {
        code |= static_cast<uint32_t>(c - '0');
      } else if ((c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F')) {
        code |= static_cast<uint32_t>((c | 0x20) - 'a' + 10);
      } else {
        return false;
      }
    }
    return true;
  }
  bool unicode(std::string* out) {
    uint32_t code = 0;
    if (!hex4(code)) return false;
    if (code >= 0xD800 && code < 0xDC00 && end_ - at_ >= 2 && at_[0] == '\\' && at_[1] == 'u') {
      const char* second = at_;
      at_ += 2;
      uint32_t low = 0;
      if (!hex4(low)) return false;
      if (low >= 0xDC00 && low < 0xE000) {
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
      } else {
        at_ = second;  // not the pair's other half: read it on its own
      }
    }
    if (code >= 0xD800 && code < 0xE000) code = 0xFFFD;
    if (out != nullptr) append_utf8(*out, code);
    return true;
  }
  bool escape(std::string* out) {
    if (at_ == end_) return false;
    constexpr std::string_view kNames = "\"\\/bfnrt";
    constexpr std::string_view kBytes = "\"\\/\b\f\n\r\t";
    const char c = *at_++;
    if (c == 'u') return unicode(out);
    const size_t i = kNames.find(c);
    if (i == std::string_view::npos) return false;
    if (out != nullptr) *out += kBytes[i];
    return true;
  }

  const char* at_;
  const char* end_;
};

}  // namespace

const char* parse_json_text(std::string_view line, std::string& text) {
  text.clear();
  Parser parser(line);
  if (!parser.take('{')) return "not a JSON object";
  bool found = false;
  std::string key;
  if (!parser.take('}')) {
    do {
      key.clear();
      if (!parser.string(&key) || !parser.take(':')) return "not valid JSON";
      if (key != "text") {
        if (!parser.value(0)) return "not valid JSON";
      } else if (!parser.peek('"')) {
        return "\"text\" is not a string";
      } else {
        text.clear();
        if (!parser.string(&text)) return "not valid JSON";
        found = true;
      }
    } while (parser.take(','));
    if (!parser.take('}')) return "not valid JSON";
  }
  if (!parser.at_end()) return "not valid JSON";
  if (!found) return "no \"text\"";
  return text.empty() ? "empty \"text\"" : nullptr;
}

}  // namespace muster
