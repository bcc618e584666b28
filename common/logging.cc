#include "common/logging.h"

#include <spdlog/sinks/stdout_sinks.h>

#include <cstdlib>

namespace muster {

void init_logging(const std::string& who) {
  auto logger =
      std::make_shared<spdlog::logger>(who, std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_pattern("%Y-%m-%d %H:%M:%S.%e %L %n %v");
  logger->flush_on(spdlog::level::trace);
  const char* level = std::getenv("MUSTER_LOG");
  logger->set_level(level == nullptr ? spdlog::level::info : spdlog::level::from_str(level));
  spdlog::set_default_logger(logger);
}

}  // namespace muster
