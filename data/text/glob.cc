#include "data/text/glob.h"

#include <fnmatch.h>

#include <algorithm>

namespace muster {
namespace {

bool name_matches(const std::string& pattern, const std::string& name) {
  return ::fnmatch(pattern.c_str(), name.c_str(), FNM_PERIOD) == 0;
}

// Whether a name from path[from] on begins with '.'.
bool hidden(const std::vector<std::string>& path, size_t from) {
  return std::any_of(path.begin() + static_cast<std::ptrdiff_t>(from), path.end(),
                     [](const std::string& name) { return name.starts_with('.'); });
}

GlobMatch match_from(const std::vector<std::string>& pattern, size_t i,
                     const std::vector<std::string>& path, size_t j) {
  // What is left of the path lies below a match.
  if (i == pattern.size()) return hidden(path, j) ? GlobMatch::kNo : GlobMatch::kYes;
  if (pattern[i] == "**") {
    // "**" at the end takes everything below; elsewhere it takes none, one, two … folders.
    if (i + 1 == pattern.size()) {
      if (j == path.size()) return GlobMatch::kBelow;
      return hidden(path, j) ? GlobMatch::kNo : GlobMatch::kYes;
    }
    GlobMatch best = GlobMatch::kBelow;
    for (size_t k = j; k < path.size(); ++k) {
      best = std::max(best, match_from(pattern, i + 1, path, k));
      if (path[k].starts_with('.')) break;
    }
    return best;
  }
  if (j == path.size()) return GlobMatch::kBelow;
  if (!name_matches(pattern[i], path[j])) return GlobMatch::kNo;
  return match_from(pattern, i + 1, path, j + 1);
}

}  // namespace

std::vector<std::string> split_path(std::string_view path) {
  std::vector<std::string> parts;
  while (!path.empty()) {
    const size_t slash = path.find('/');
    const std::string_view part = path.substr(0, slash);
    if (!part.empty() && part != ".") parts.emplace_back(part);
    path.remove_prefix(slash == std::string_view::npos ? path.size() : slash + 1);
  }
  return parts;
}

bool is_glob(std::string_view path) {
  return path.find_first_of("*?[") != std::string_view::npos;
}

GlobMatch match_glob(const std::vector<std::string>& pattern,
                     const std::vector<std::string>& path) {
  return match_from(pattern, 0, path, 0);
}

}  // namespace muster
