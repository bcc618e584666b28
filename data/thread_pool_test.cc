#include "data/thread_pool.h"

#include <atomic>
#include <future>
#include <latch>
#include <memory>
#include <utility>

#include "data/testing.h"

namespace muster {
namespace {

TEST(ThreadPool, RunsTasksAtTheSameTime) {
  ThreadPool pool(3);
  std::latch all(3);  // passes only when three tasks run at once
  std::promise<void> passed;
  for (int i = 0; i < 3; ++i) {
    pool.submit([&, i] {
      all.arrive_and_wait();
      if (i == 0) passed.set_value();
    });
  }
  EXPECT_EQ(passed.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
}

TEST(ThreadPool, KeepsTheOrderWithOneThread) {
  std::vector<int> order;
  std::promise<void> last;
  ThreadPool pool(1);
  for (int i = 0; i < 100; ++i) pool.submit([&, i] { order.push_back(i); });
  pool.submit([&] { last.set_value(); });
  ASSERT_EQ(last.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  EXPECT_EQ(order.size(), 100u);
}

TEST(ThreadPool, FinishesWhatRunsAndDropsWhatWaits) {
  std::atomic<int> ran{0};
  std::promise<void> started;
  std::promise<void> go_on;
  std::thread release;
  {
    ThreadPool pool(1);
    pool.submit([&, wait = go_on.get_future().share()] {
      started.set_value();
      wait.wait();
      ++ran;
    });
    ASSERT_EQ(started.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
    auto held = std::make_shared<int>();  // by the waiting tasks alone
    for (int i = 0; i < 10; ++i) pool.submit([&, held] { ++ran; });
    release = std::thread([&, waiting = std::weak_ptr(std::exchange(held, nullptr))] {
      // The first task may end only once the destructor has dropped the others.
      const Deadline deadline = soon();
      while (!waiting.expired() && !deadline.passed()) std::this_thread::yield();
      go_on.set_value();
    });
  }
  release.join();
  EXPECT_EQ(ran, 1);
}

}  // namespace
}  // namespace muster
