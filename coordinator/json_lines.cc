#include "coordinator/json_lines.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/logging.h"

namespace muster {

JsonLines::JsonLines(const std::string& path)
    : path_(path), file_(open(path.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0644)) {
  if (!file_.valid()) throw IoError(fmt::format("{}: {}", path, std::strerror(errno)));
  struct stat info {};
  char last = '\n';
  if (fstat(file_.get(), &info) != 0 || !S_ISREG(info.st_mode) || info.st_size == 0 ||
      pread(file_.get(), &last, 1, info.st_size - 1) != 1 || last == '\n') {
    return;
  }
  const size_t whole = read_file(path).rfind('\n') + 1;  // npos + 1 is 0
  if (ftruncate(file_.get(), static_cast<off_t>(whole)) != 0) {
    throw IoError(fmt::format("{}: {}", path, std::strerror(errno)));
  }
}

void JsonLines::append(const nlohmann::ordered_json& object) noexcept {
  struct stat before {};
  try {
    // Text from elsewhere (paths, error messages) may not be UTF-8.
    const std::string line =
        object.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
    if (fstat(file_.get(), &before) != 0) throw IoError(path_ + ": " + std::strerror(errno));
    write_all(file_.get(), line, path_);
  } catch (const std::exception& e) {
    if (!failed_) spdlog::warn("lines are missing from now on: {}", e.what());
    failed_ = true;
    [[maybe_unused]] int ignored = ftruncate(file_.get(), before.st_size);
  }
}

std::vector<nlohmann::json> read_json_lines(const std::string& path) {
  std::vector<nlohmann::json> objects;
  if (!std::filesystem::exists(path)) return objects;
  const std::string content = read_file(path);
  size_t begin = 0;
  for (size_t end; (end = content.find('\n', begin)) != std::string::npos; begin = end + 1) {
    objects.push_back(nlohmann::json::parse(content.begin() + static_cast<int64_t>(begin),
                                            content.begin() + static_cast<int64_t>(end), nullptr,
                                            /*allow_exceptions=*/false));
    if (!objects.back().is_object()) {
      throw DataError(fmt::format("{}:{}: not an object of JSON", path, objects.size()));
    }
  }
  return objects;
}

void forget_steps_after(const std::string& path, int64_t step) {
  if (!std::filesystem::exists(path)) return;
  const std::string content = read_file(path);
  std::string kept;
  for (size_t begin = 0; begin < content.size();) {
    const size_t end = content.find('\n', begin);
    if (end == std::string::npos) break;
    const std::string line = content.substr(begin, end - begin);
    begin = end + 1;
    const auto object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!object.is_object()) continue;
    const auto found = object.find("step");
    const bool redone = found != object.end() && found->is_number() && found->get<int64_t>() > step;
    if (!redone) kept += line + "\n";
  }
  if (kept.size() != content.size()) write_file_atomic(path, kept);
}

std::string timestamp() {
  const auto now = std::chrono::system_clock::now();
  const auto ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count();
  const std::time_t seconds = static_cast<std::time_t>(ms / 1000);
  std::tm parts{};
  gmtime_r(&seconds, &parts);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z", parts.tm_year + 1900,
                     parts.tm_mon + 1, parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec,
                     ms % 1000);
}

}  // namespace muster
