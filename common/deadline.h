// A point in steady time after which a wait gives up. Every blocking call takes one.
#pragma once

#include <algorithm>
#include <chrono>

namespace muster {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Deadline(Clock::time_point at) : at_(at) {}
  static Deadline after(std::chrono::duration<double> wait) {
    return Deadline(Clock::now() + std::chrono::duration_cast<Clock::duration>(wait));
  }
  static Deadline now() { return Deadline(Clock::now()); }

  Clock::time_point at() const { return at_; }
  bool passed() const { return Clock::now() >= at_; }
  // Time left, never negative, rounded up to whole milliseconds so that poll() does not spin.
  std::chrono::milliseconds left() const {
    auto left = std::chrono::ceil<std::chrono::milliseconds>(at_ - Clock::now());
    return std::max(left, std::chrono::milliseconds(0));
  }
  Deadline earlier(const Deadline& other) const { return Deadline(std::min(at_, other.at_)); }

 private:
  Clock::time_point at_;
};

}  // namespace muster
