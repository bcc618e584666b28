// A file of JSON objects, one a line, that only ever grows.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "common/files.h"

namespace muster {

class JsonLines {
 public:
  // Opens for appending; a half-written last line (a crash, a full disk) is cut off. Throws
  // IoError.
  explicit JsonLines(const std::string& path);

  // Appends one object. A log must not end a run: what cannot be written (disk full) is left out
  // whole, and the first time logged.
  void append(const nlohmann::ordered_json& object) noexcept;

 private:
  std::string path_;
  Fd file_;
  bool failed_ = false;
};

// The objects of such a file, in order; a half-written last line is left out. No file: none. Throws
// IoError, and DataError naming the line that is no object.
std::vector<nlohmann::json> read_json_lines(const std::string& path);

// Removes the lines whose "step" is above `step`: a resumed run writes them again. No file is fine.
// Throws IoError.
void forget_steps_after(const std::string& path, int64_t step);

// "2026-01-31T12:00:00.123Z", now.
std::string timestamp();

}  // namespace muster
