// Shell patterns over '/'-separated paths: * ? [set] inside a name, ** for any number of folders.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace muster {

// The parts of a path between slashes; empty ones and "." are dropped.
std::vector<std::string> split_path(std::string_view path);

bool is_glob(std::string_view path);

enum class GlobMatch : uint8_t {
  kNo,     // neither the path nor anything below it
  kBelow,  // not the path, but perhaps something below it
  kYes     // the path, or a folder above it
};
// Names that begin with '.' match only where the pattern spells the '.' out.
GlobMatch match_glob(const std::vector<std::string>& pattern, const std::vector<std::string>& path);

}  // namespace muster
