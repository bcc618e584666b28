// Linked into every test under the thread sanitizer. libzmq and libsodium are not built with it, so
// their lock-free queues do not count as synchronisation, and every message that passes from one
// thread to another through a socket looks like a race. Nor is libspdlog, whose registry is made by
// whichever thread logs first, inside a static initialisation that the sanitizer does not see the
// others wait for. Nor is libgloo: a buffer's end waits for whoever fills it by counting references
// in there. Nor is libstdc++, which counts the references of an exception that has gone from one
// thread to another. Races that involve none of their frames are still reported.
extern "C" const char* __tsan_default_suppressions() {  // NOLINT: the sanitizer's name
  return "race:libzmq.so\nrace:libsodium.so\nrace:spdlog::details::registry\n"
         "race:libgloo.so\nrace:std::__exception_ptr::exception_ptr::_M_release\n";
}
