// Simulated time: what is to happen, in order of time, then of being asked for. Pure.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace muster::simulation {

class EventQueue {
 public:
  using Call = std::function<void()>;

  double now() const { return now_; }
  bool empty() const { return heap_.empty(); }
  double next_time() const { return heap_.front().time; }

  // Not in the past: an earlier time means now.
  void at(double time, Call call) {
    heap_.push_back({std::max(time, now_), ++sequence_, std::move(call)});
    std::push_heap(heap_.begin(), heap_.end(), later);
  }
  // Not empty.
  void run_next() {
    std::pop_heap(heap_.begin(), heap_.end(), later);
    Entry entry = std::move(heap_.back());
    heap_.pop_back();
    now_ = entry.time;
    entry.call();
  }

 private:
  struct Entry {
    double time;
    uint64_t sequence;
    Call call;
  };
  static bool later(const Entry& a, const Entry& b) {
    return std::pair(a.time, a.sequence) > std::pair(b.time, b.sequence);
  }

  double now_ = 0.0;
  uint64_t sequence_ = 0;
  std::vector<Entry> heap_;
};

}  // namespace muster::simulation
