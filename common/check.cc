#include "common/check.h"

#include <cstdio>
#include <cstdlib>

namespace muster {

void check_failed(const char* file, int line, const char* expression, const std::string& message) {
  std::fprintf(stderr, "%s:%d: CHECK failed: %s%s%s\n", file, line, expression,
               message.empty() ? "" : ": ", message.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace muster
