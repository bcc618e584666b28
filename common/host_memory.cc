#include "common/host_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>

#include "common/error.h"
#include "common/files.h"

namespace muster {

namespace {

// What the files of a memory cgroup are called.
struct CgroupFiles {
  const char* mount;
  const char* limit;
  const char* use;
  const char* idle_cache;  // in memory.stat
};
constexpr CgroupFiles kVersion2{"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"};
constexpr CgroupFiles kVersion1{"/sys/fs/cgroup/memory", "memory.limit_in_bytes",
                                "memory.usage_in_bytes", "total_inactive_file"};

// "" where there is no such file.
std::string try_read(const std::string& path) {
  try {
    return read_file(path);
  } catch (const IoError&) {
    return "";
  }
}

std::optional<size_t> number(const std::string& text) {
  std::istringstream words(text);
  size_t value = 0;
  return words >> value ? std::optional(value) : std::nullopt;
}

// Of the first line "NAME value" or "NAME: value".
std::optional<size_t> value_of(const std::string& text, const std::string& name) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(name + ":")) return number(line.substr(name.size() + 1));
    if (line.starts_with(name + " ")) return number(line.substr(name.size()));
  }
  return std::nullopt;
}

// What one cgroup leaves of its limit; nullopt where it has none.
std::optional<size_t> left_in(const std::string& folder, const CgroupFiles& files) {
  const auto limit = number(try_read(folder + "/" + files.limit));
  const auto use = number(try_read(folder + "/" + files.use));
  if (!limit || !use) return std::nullopt;
  const size_t cache = value_of(try_read(folder + "/memory.stat"), files.idle_cache).value_or(0);
  const size_t held = *use - std::min(*use, cache);
  return *limit - std::min(*limit, held);
}

// Of the cgroup `path` and those above it. In a container `path` may be the host's name for what is
// mounted here as the topmost one: folders that are not there are passed over.
std::optional<size_t> least_left(const std::string& root, const CgroupFiles& files,
                                 std::string path) {
  std::optional<size_t> least;
  while (true) {
    while (path.ends_with('/')) path.pop_back();
    if (const auto left = left_in(fmt::format("{}{}{}", root, files.mount, path), files)) {
      least = std::min(*left, least.value_or(*left));
    }
    if (path.empty()) return least;
    path.erase(path.find_last_of('/') == std::string::npos ? 0 : path.find_last_of('/'));
  }
}

}  // namespace

std::optional<size_t> available_host_memory(const std::string& root) {
  auto available = value_of(try_read(root + "/proc/meminfo"), "MemAvailable");
  if (available) *available *= 1024;
  // Lines "number:controllers:path"; version 2 has the number 0 and no controllers.
  std::istringstream lines(try_read(root + "/proc/self/cgroup"));
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = fmt::format(",{},", line.substr(first + 1, second - first - 1));
    const bool version2 = controllers == ",,";
    if (!version2 && controllers.find(",memory,") == std::string::npos) continue;
    const auto left = least_left(root, version2 ? kVersion2 : kVersion1, line.substr(second + 1));
    if (left) available = std::min(*left, available.value_or(*left));
  }
  return available;
}

}  // namespace muster
