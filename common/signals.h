// Signals as counters: the handler counts and wakes, the event loop decides.
#pragma once

namespace muster {

class Waker;

// While it lives, SIGINT, SIGTERM, SIGHUP and SIGUSR1 are counted, and with `children` the ends of
// child processes wake too. At the end the former handlers are back. At most one at a time in a
// process.
class SignalWatch {
 public:
  // `waker` must outlive this object.
  explicit SignalWatch(Waker& waker, bool children = false);
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

  // How many have come since the start. Two SIGINTs close together count two, as two Ctrl-C should.
  int interrupts() const;    // SIGINT
  int terminations() const;  // SIGTERM and SIGHUP
  int user_signals() const;  // SIGUSR1
};

}  // namespace muster
