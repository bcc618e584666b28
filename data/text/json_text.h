// The "text" of one line of a .jsonl file.
//
// Not nlohmann/json: it refuses strings that are not UTF-8, and text must keep its bytes as they
// are; and a DOM of every line costs several times what decoding does.
#pragma once

#include <string>
#include <string_view>

namespace muster {

// Checks that `line` is one JSON object (RFC 8259, except that strings may hold any bytes from
// 0x20) and replaces `text` with the string under the top-level key "text" (of several, the last).
// Escapes are decoded to UTF-8, a lone surrogate to U+FFFD. Returns nullptr, or why the line is
// bad.
const char* parse_json_text(std::string_view line, std::string& text);

}  // namespace muster
