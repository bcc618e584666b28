// What a run's files say about its end: the last event, and the errors of processes that died.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace muster {

// Files that grow during a run: what was in them before it does not count.
class GrowingFiles {
 public:
  // Remembers where the file ends now; returns the path.
  const std::string& watch(const std::string& path);
  // What has been added since watch(); "" when there is nothing or no such file.
  std::string added(const std::string& path) const;
  // The same, up to the last whole line, and counts it as seen.
  std::string take_lines(const std::string& path);

 private:
  std::map<std::string, uint64_t> ends_;
};

// The reason of the last event in lines of events.jsonl; "" when there is none. Lines that are no
// events are passed over.
std::string last_reason(const std::string& events);
// What a user should hear of at once, of lines of events.jsonl, in words: rejected or failed
// checkpoints, skipped updates, warnings, and how the run's members and size change. One reason in
// a row is told once.
std::vector<std::string> troubles(const std::string& events);
// The error lines of a node agent's log (level E, and what it died of) with what is quoted below
// them, at most the last `most` lines.
std::vector<std::string> error_lines(const std::string& log, size_t most);
// The last line that begins with `prefix`, without it, and the lines below it; "" when there is
// none.
std::string last_message(const std::string& log, const std::string& prefix);
// The last lines, at most `most`.
std::vector<std::string> last_lines(const std::string& text, size_t most);

}  // namespace muster
