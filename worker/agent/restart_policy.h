// Whether and when a process of a node that crashed is started anew. Pure: time is given.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>

#include "common/process.h"

namespace muster {

struct RestartLimits {
  int64_t restarts = 3;     // of all processes together within window_s; 0: nothing is started anew
  double window_s = 300.0;  // seconds, like all below
  double cool_down_s = 60.0;
};

struct RestartDecision {
  // When another process is to be started in the place of the one that ended; nullopt: never.
  std::optional<double> start_at;
  // Not empty: there were too many crashes, and that is why nothing is started before
  // `start_at`, the end of the cool-down. For people.
  std::string set_aside;
};

class RestartPolicy {
 public:
  explicit RestartPolicy(const RestartLimits& limits) : limits_(limits) {}

  // The process in `slot` ended as `status` after `lived_s`; `name` is for the reason. Status 0 is
  // no crash: whoever leaves so was told to. Restarts that were granted before the node is set
  // aside stand: the coordinator counts on them.
  RestartDecision on_exit(double now, int slot, const ExitStatus& status, double lived_s,
                          const std::string& name);
  // From when on something may be started: the end of the cool-down, or `now`.
  double open_at(double now) const;

 private:
  // The wait before the next start in `slot`: doubles with each crash that follows a short life.
  double backoff(int slot, double lived_s);

  const RestartLimits limits_;
  std::deque<double> crashes_;  // within the window, oldest first
  std::map<int, double> backoff_s_;
  std::optional<double> set_aside_until_;
};

}  // namespace muster
