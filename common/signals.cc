#include "common/signals.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>

#include "common/check.h"
#include "common/transport/transport.h"

namespace muster {
namespace {

constexpr std::array<int, 5> kSignals = {SIGINT, SIGTERM, SIGUSR1, SIGHUP, SIGCHLD};

// All that the handler touches. Lock-free, or it could not be touched from there.
std::atomic<Waker*> g_waker = nullptr;
std::array<std::atomic<int>, kSignals.size()> g_counts;
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<Waker*>::is_always_lock_free);

std::array<struct sigaction, kSignals.size()> g_former;
bool g_watches_children = false;

void on_signal(int number) {
  const int saved_errno = errno;
  for (size_t i = 0; i < kSignals.size(); ++i) {
    if (kSignals[i] == number) g_counts[i].fetch_add(1, std::memory_order_relaxed);
  }
  if (Waker* waker = g_waker.load(std::memory_order_acquire)) waker->wake();
  errno = saved_errno;
}

bool watched(int number) {
  return number != SIGCHLD || g_watches_children;
}

}  // namespace

SignalWatch::SignalWatch(Waker& waker, bool children) {
  MUSTER_CHECK(g_waker.load() == nullptr, "a SignalWatch exists already");
  g_watches_children = children;
  for (auto& count : g_counts) count = 0;
  g_waker.store(&waker, std::memory_order_release);
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART | SA_NOCLDSTOP;
  ::sigemptyset(&action.sa_mask);
  for (size_t i = 0; i < kSignals.size(); ++i) {
    if (watched(kSignals[i])) ::sigaction(kSignals[i], &action, &g_former[i]);
  }
}

SignalWatch::~SignalWatch() {
  for (size_t i = 0; i < kSignals.size(); ++i) {
    if (watched(kSignals[i])) ::sigaction(kSignals[i], &g_former[i], nullptr);
  }
  g_waker.store(nullptr, std::memory_order_release);
}

int SignalWatch::interrupts() const {
  return g_counts[0].load(std::memory_order_relaxed);
}
int SignalWatch::terminations() const {
  // A terminal that closes asks for the same.
  return g_counts[1].load(std::memory_order_relaxed) + g_counts[3].load(std::memory_order_relaxed);
}
int SignalWatch::user_signals() const {
  return g_counts[2].load(std::memory_order_relaxed);
}

}  // namespace muster
