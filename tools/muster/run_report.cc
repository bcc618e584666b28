#include "tools/muster/run_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>

#include "common/error.h"
#include "common/files.h"
#include "worker/agent/agent.h"

namespace muster {
namespace {

namespace fs = std::filesystem;

// How a kind of event is told.
struct Telling {
  const char* kind;
  const char* words;
  bool pause = false;  // the event's duration is what training paused for
};
constexpr Telling kToldAtOnce[] = {
    {"checkpoint_rejected", "checkpoint rejected"},
    {"checkpoint_failed", "checkpoint failed"},
    {"step_skipped", "step skipped"},
    {"warning", "warning"},
    {"worker_lost", "worker lost"},
    {"data_service_lost", "data service lost"},
    {"node_lost", "node lost"},
    {"process_lost", "process lost"},
    {"node_set_aside", "node set aside"},
    {"workers_started", "more workers"},
    {"not_prepared", "not resized yet"},
    {"straggler", "slow worker"},
    {"draining", "leaving"},
    {"restarted", "started anew"},
    {"recovered", "training again", /*pause=*/true},
    {"resized", "resized", /*pause=*/true},
    {"waiting", "waiting"},
    {"state_lost", "state lost"},
    {"restored", "coordinator"},
    {"steps_redone", "done again"},
};

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::vector<std::string> keep_last(std::vector<std::string> lines, size_t most) {
  if (lines.size() > most) lines.erase(lines.begin(), lines.end() - static_cast<int64_t>(most));
  return lines;
}

}  // namespace

const std::string& GrowingFiles::watch(const std::string& path) {
  std::error_code missing;
  const uint64_t size = fs::file_size(path, missing);
  return ends_.insert_or_assign(path, missing ? 0 : size).first->first;
}

std::string GrowingFiles::added(const std::string& path) const {
  std::error_code missing;
  const uint64_t size = fs::file_size(path, missing);
  const auto end = ends_.find(path);
  if (missing || end == ends_.end() || size <= end->second) return "";
  const uint64_t before = end->second;
  return read_file_tail(path, size - before);
}

std::string GrowingFiles::take_lines(const std::string& path) {
  std::string text = added(path);
  text.resize(text.rfind('\n') + 1);  // npos + 1 is 0
  ends_[path] += text.size();
  return text;
}

std::vector<std::string> troubles(const std::string& events) {
  std::vector<std::string> troubles;
  std::string told;  // the newest reason
  for (const std::string& line : lines_of(events)) {
    const auto event = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!event.is_object()) continue;
    const std::string kind = event.value("kind", "");
    const auto* telling = std::find_if(std::begin(kToldAtOnce), std::end(kToldAtOnce),
                                       [&](const Telling& each) { return kind == each.kind; });
    if (telling == std::end(kToldAtOnce)) continue;
    // What is lost with a node has the node's reason.
    const std::string reason = event.value("reason", "");
    if (reason == told) continue;
    told = reason;
    std::string trouble = fmt::format("{}: {}", telling->words, reason);
    const double seconds = event.value("duration_s", 0.0);
    if (telling->pause && seconds > 0)
      trouble += fmt::format(", after a pause of {:.2f} s", seconds);
    troubles.push_back(std::move(trouble));
  }
  return troubles;
}

std::string last_reason(const std::string& events) {
  const std::vector<std::string> lines = lines_of(events);
  for (auto line = lines.rbegin(); line != lines.rend(); ++line) {
    const auto event = nlohmann::json::parse(*line, nullptr, /*allow_exceptions=*/false);
    if (!event.is_object()) continue;
    const auto reason = event.find("reason");
    if (reason != event.end() && reason->is_string()) return reason->get<std::string>();
  }
  return "";
}

std::vector<std::string> error_lines(const std::string& log, size_t most) {
  std::vector<std::string> errors;
  bool in_error = false;
  for (const std::string& line : lines_of(log)) {
    // "2026-01-31 12:00:00.123 E node text", see logging.h.
    constexpr size_t kLevel = 24;
    if (!line.starts_with(kQuotedLogPrefix)) {
      in_error = (line.size() > kLevel && line[kLevel] == 'E') || line.starts_with("muster node: ");
    }
    if (in_error) errors.push_back(line);
  }
  return keep_last(std::move(errors), most);
}

std::string last_message(const std::string& log, const std::string& prefix) {
  const size_t below = log.rfind("\n" + prefix);
  if (below == std::string::npos && !log.starts_with(prefix)) return "";
  std::string message = log.substr((below == std::string::npos ? 0 : below + 1) + prefix.size());
  while (message.ends_with('\n')) message.pop_back();
  return message;
}

std::vector<std::string> last_lines(const std::string& text, size_t most) {
  return keep_last(lines_of(text), most);
}

}  // namespace muster
