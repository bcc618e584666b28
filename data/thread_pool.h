// A fixed number of threads that run tasks in the order of their submission.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace muster {

class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  // Finishes the tasks that run, drops those that wait, joins.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // A task must not throw.
  void submit(std::function<void()> task);

 private:
  void work();

  std::mutex mutex_;  // guards tasks_ and closing_
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool closing_ = false;
  std::vector<std::jthread> threads_;  // last: joins before the rest goes
};

}  // namespace muster
