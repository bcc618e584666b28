// Logging: one line an event, "2026-01-31 12:00:00.123 I worker/0 text", to stderr. Thread-safe.
#pragma once

#include <spdlog/spdlog.h>

#include <string>

namespace muster {

// Names this process in every line ("coordinator", "data", "worker/3f2a").
// MUSTER_LOG=debug|info|warn|error sets the level.
void init_logging(const std::string& who);

}  // namespace muster
