#include "data/text/format.h"

#include <algorithm>
#include <cctype>

namespace muster {
namespace {

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() > end.size() &&  // a bare ".txt" is a hidden file without extension
         std::equal(end.rbegin(), end.rend(), text.rbegin(), [](char a, char b) {
           return a == std::tolower(static_cast<unsigned char>(b));
         });
}

}  // namespace

std::optional<TextFormat> text_format(std::string_view path) {
  std::string_view name = path.substr(path.rfind('/') + 1);
  TextFormat format;
  if (ends_with(name, ".gz")) {
    format.compression = Compression::kGzip;
    name.remove_suffix(3);
  } else if (ends_with(name, ".zst")) {
    format.compression = Compression::kZstd;
    name.remove_suffix(4);
  }
  if (ends_with(name, ".jsonl")) {
    format.json_lines = true;
    return format;
  }
  if (ends_with(name, ".txt") || ends_with(name, ".rst") || ends_with(name, ".md")) return format;
  return std::nullopt;
}

}  // namespace muster
