// Linked into every test under the thread sanitizer. libzmq and libsodium are not built with it, so
// their lock-free queues do not count as synchronisation, and every message that passes from one
// thread to another through a socket looks like a race. Nor is libgloo: a buffer's end waits for
// whoever fills it by counting references in there. Nor is libstdc++, which counts the references
// of an exception that has gone from one thread to another. Races that involve none of their frames
// are still reported.
#include <spdlog/spdlog.h>

extern "C" const char* __tsan_default_suppressions() {  // NOLINT: the sanitizer's name
  return "race:libzmq.so\nrace:libsodium.so\nrace:libgloo.so\n"
         "race:std::__exception_ptr::exception_ptr::_M_release\n";
}

// libspdlog is not built with it either, and makes its registry when somebody first logs, inside a
// static initialisation that the sanitizer does not see the other threads wait for. So it is made
// here, before there are any.
[[maybe_unused]] static const auto kRegistry = spdlog::default_logger();
