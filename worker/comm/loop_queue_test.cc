#include "worker/comm/loop_queue.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <thread>

namespace muster {
namespace {

std::shared_ptr<gloo::transport::tcp::Device> loopback() {
  return std::dynamic_pointer_cast<gloo::transport::tcp::Device>(
      gloo::transport::tcp::CreateDevice(gloo::transport::tcp::attr("127.0.0.1")));
}

TEST(LoopQueue, RunsInOrderOnOneOtherThread) {
  LoopQueue queue(loopback());
  std::vector<int> order;
  std::thread::id thread;
  std::promise<void> done;
  for (int i = 0; i < 1000; ++i) {
    queue.post([&, i] {
      order.push_back(i);
      thread = std::this_thread::get_id();
    });
  }
  queue.post([&] { done.set_value(); });
  ASSERT_EQ(done.get_future().wait_for(std::chrono::seconds(10)), std::future_status::ready);
  ASSERT_EQ(order.size(), 1000u);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(order[i], i);
  EXPECT_NE(thread, std::this_thread::get_id());
}

TEST(LoopQueue, NothingRunsAfterItsEnd) {
  const auto device = loopback();
  auto alive = std::make_shared<std::atomic<bool>>(true);
  auto late = std::make_shared<std::atomic<int>>(0);
  {
    LoopQueue queue(device);
    for (int i = 0; i < 100; ++i) {
      queue.post([alive, late] { *late += *alive ? 0 : 1; });
    }
  }
  *alive = false;
  LoopQueue other(device);
  std::promise<void> tick;
  other.post([&] { tick.set_value(); });
  ASSERT_EQ(tick.get_future().wait_for(std::chrono::seconds(10)), std::future_status::ready);
  EXPECT_EQ(*late, 0);
}

}  // namespace
}  // namespace muster
