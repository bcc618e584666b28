// Linked into every test under the thread sanitizer. libzmq and libsodium are not built with it, so
// their lock-free queues do not count as synchronisation, and every message that passes from one
// thread to another through a socket looks like a race. Races that involve none of their frames are
// still reported.
extern "C" const char* __tsan_default_suppressions() {  // NOLINT: the sanitizer's name
  return "race:libzmq.so\nrace:libsodium.so\n";
}
