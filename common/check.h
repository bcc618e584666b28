// CHECK: a broken invariant stops the process with file and line. Never use it on input from
// outside.
#pragma once

#include <string>

namespace muster {

// Prints "file:line: CHECK failed: expression: message" to stderr and aborts.
[[noreturn]] void check_failed(const char* file, int line, const char* expression,
                               const std::string& message);

}  // namespace muster

#define MUSTER_CHECK(expression, ...)                                                    \
  do {                                                                                   \
    if (!(expression)) [[unlikely]]                                                      \
      ::muster::check_failed(__FILE__, __LINE__, #expression, std::string{__VA_ARGS__}); \
  } while (false)
