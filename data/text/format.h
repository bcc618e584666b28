// Which files hold text, told by their names alone: .txt .rst .md .jsonl, each plain, .gz or .zst.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace muster {

enum class Compression : uint8_t { kNone, kGzip, kZstd };

struct TextFormat {
  Compression compression = Compression::kNone;
  bool json_lines = false;  // one JSON object a line, its text under "text"; else one document
  bool operator==(const TextFormat&) const = default;
};

// For messages: what text_format() accepts.
constexpr const char* kTextExtensions = ".txt, .rst, .md or .jsonl, plain, .gz or .zst";

// nullopt for a file that is no text source. Letter case of the extension does not matter.
std::optional<TextFormat> text_format(std::string_view path);

}  // namespace muster
