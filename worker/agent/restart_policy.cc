#include "worker/agent/restart_policy.h"

#include <fmt/format.h>

#include <algorithm>

namespace muster {
namespace {

constexpr double kFirstBackoffS = 0.1;
constexpr double kLongestBackoffS = 5.0;
// Whoever lived so long was not killed by what killed the one before it.
constexpr double kLongLifeS = 30.0;

}  // namespace

RestartDecision RestartPolicy::on_exit(double now, int slot, const ExitStatus& status,
                                       double lived_s, const std::string& name) {
  if (status.ok() || limits_.restarts == 0) return {};
  if (now < open_at(now)) {
    return {.start_at = set_aside_until_,
            .set_aside = fmt::format("{} {}; its node is set aside for another {:.1f} s", name,
                                     status.to_string(), *set_aside_until_ - now)};
  }
  while (!crashes_.empty() && now - crashes_.front() > limits_.window_s) crashes_.pop_front();
  crashes_.push_back(now);
  const double wait = backoff(slot, lived_s);
  if (static_cast<int64_t>(crashes_.size()) <= limits_.restarts) {
    return {.start_at = now + wait, .set_aside = ""};
  }
  set_aside_until_ = now + limits_.cool_down_s;
  RestartDecision decision{
      .start_at = set_aside_until_,
      .set_aside = fmt::format("{} {}, crash {} on its node within {:.0f} s "
                               "(elastic.restarts = {}): the node is set aside for {:.1f} s",
                               name, status.to_string(), crashes_.size(), now - crashes_.front(),
                               limits_.restarts, limits_.cool_down_s)};
  // After the cool-down it is judged afresh.
  crashes_.clear();
  backoff_s_.clear();
  return decision;
}

double RestartPolicy::open_at(double now) const {
  return std::max(now, set_aside_until_.value_or(now));
}

double RestartPolicy::backoff(int slot, double lived_s) {
  const auto [entry, first] = backoff_s_.try_emplace(slot, kFirstBackoffS);
  if (!first) {
    entry->second =
        lived_s >= kLongLifeS ? kFirstBackoffS : std::min(2 * entry->second, kLongestBackoffS);
  }
  return entry->second;
}

}  // namespace muster
