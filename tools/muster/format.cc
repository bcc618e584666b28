#include "tools/muster/format.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "common/protocol/muster.pb.h"

namespace muster {

std::string format_duration(double seconds) {
  if (seconds < 59.95) return fmt::format("{:.1f} s", seconds);
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  if (whole < 3600) return fmt::format("{} min {} s", whole / 60, whole % 60);
  return fmt::format("{} h {} min", whole / 3600, whole % 3600 / 60);
}

std::string format_count(double count) {
  // Bounds where rounding to three digits reaches the next unit.
  if (count < 999.5) return fmt::format("{:.0f}", count);
  if (count < 999.5e3) return fmt::format("{:.3g} k", count / 1e3);
  if (count < 999.5e6) return fmt::format("{:.3g} M", count / 1e6);
  return fmt::format("{:.3g} G", count / 1e9);
}

std::string progress_line(const proto::Status& status) {
  std::string line = fmt::format("step {}/{}", status.step(), status.total_steps());
  // A resumed run has a step before it has a loss.
  if (status.step() == 0 || status.loss() == 0) return line;
  line +=
      fmt::format(" ({} %), loss {:.4f}",
                  status.step() * 100 / std::max<int64_t>(status.total_steps(), 1), status.loss());
  if (status.has_held_out()) line += fmt::format(", held-out {:.4f}", status.held_out_loss());
  if (status.tokens_per_s() > 0) {
    line += fmt::format(", {} tokens/s", format_count(status.tokens_per_s()));
  }
  return line;
}

int training_workers(const proto::Status& status) {
  const auto trains = [](const proto::MemberStatus& member) {
    return member.role() == proto::ROLE_WORKER && member.rank() >= 0 &&
           (member.state() == "active" || member.state() == "draining");
  };
  return static_cast<int>(std::count_if(status.members().begin(), status.members().end(), trains));
}

std::string unused_files(const proto::Status& status) {
  const auto count = [](int64_t files) {
    return fmt::format("{} file{}", files, files == 1 ? "" : "s");
  };
  std::string text;
  if (status.skipped_files() > 0) {
    text = fmt::format("{} could not be used and {} skipped", count(status.skipped_files()),
                       status.skipped_files() == 1 ? "was" : "were");
  }
  if (status.partly_used_files() > 0) {
    text += fmt::format("{}of {} some lines were left out", text.empty() ? "" : "; ",
                        count(status.partly_used_files()));
  }
  return text;
}

std::string progress_bar(double share, int width) {
  const int filled = static_cast<int>(std::clamp(share, 0.0, 1.0) * width);
  return "[" + std::string(filled, '#') + std::string(width - filled, '-') + "]";
}

std::string shell_quoted(const std::string& argument) {
  constexpr const char* kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./=:,+@%";
  if (!argument.empty() && argument.find_first_not_of(kPlain) == std::string::npos) return argument;
  std::string quoted = "'";
  for (const char c : argument) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

std::string command_line(const std::string& name, const std::vector<std::string>& arguments) {
  std::string line = "muster " + name;
  for (const std::string& argument : arguments) line += " " + shell_quoted(argument);
  return line;
}

}  // namespace muster
