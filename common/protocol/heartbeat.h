// How long silence is borne, by everybody alike.
#pragma once

#include "common/protocol/muster.pb.h"

namespace muster {

// Silent for this many heartbeats means lost.
inline constexpr int kMissedHeartbeats = 5;

// Seconds that a member goes on without a word from its coordinator, which may be started anew.
// `heartbeat_s`: the interval of the run.
inline double patience_s(const proto::Welcome& welcome, double heartbeat_s) {
  return welcome.patience_s() > 0 ? welcome.patience_s() : kMissedHeartbeats * heartbeat_s;
}

}  // namespace muster
