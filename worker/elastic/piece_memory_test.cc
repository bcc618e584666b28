#include "worker/elastic/piece_memory.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <semaphore>
#include <thread>
#include <vector>

#include "common/error.h"
#include "kernels/runtime/runtime.h"

namespace muster {
namespace {

constexpr auto kSoon = std::chrono::seconds(10);

using Taken = std::vector<std::shared_ptr<const Tensor>>;

// Makes a buffer whenever it is let, and counts those that have not been given back.
class Maker {
 public:
  PieceMemory::Make make() {
    return [this](int64_t bytes, const std::stop_token& stop) -> Tensor {
      ++begun;
      while (!let.try_acquire_for(std::chrono::milliseconds(1))) {
        if (!stop.stop_requested()) continue;
        ++stopped;
        return {};
      }
      if (fail) throw Error("no more of it");
      ++made;
      ++there;
      Counted counted(bytes, there);
      return {{bytes}, DType::kUInt8, counted};
    };
  }
  std::counting_semaphore<> let{0};
  std::atomic<int> begun{0}, stopped{0}, made{0}, there{0};
  std::atomic<bool> fail{false};

 private:
  struct Counted : Allocator {
    Counted(int64_t size, std::atomic<int>& count) : bytes(size), there(count) {}
    Device device() const override { return Device::cpu(); }
    std::shared_ptr<void> allocate(size_t /*bytes*/) override {
      const Tensor memory = host_buffer(Device::cpu(), bytes);
      return {memory.view().raw(), [memory, &count = there](void*) { --count; }};
    }
    int64_t bytes;
    std::atomic<int>& there;
  };
};

Taken take(PieceMemory& memory, int count, int64_t bytes) {
  Taken taken(static_cast<size_t>(count));
  for (auto& one : taken) one = memory.take(bytes, bytes);
  return taken;
}

template <typename Condition>
bool soon(Condition condition) {
  const auto end = std::chrono::steady_clock::now() + kSoon;
  while (!condition() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return condition();
}

TEST(PieceMemory, IsMadeInTheBackground) {
  Maker maker;
  PieceMemory memory(Device::cpu(), true, maker.make());
  memory.prepare({.bytes = 100});
  EXPECT_FALSE(memory.prepared(100));
  maker.let.release(3);
  ASSERT_TRUE(soon([&] { return maker.made == 3; }));
  EXPECT_FALSE(memory.prepared(100));
  maker.let.release();
  ASSERT_TRUE(soon([&] { return memory.prepared(100); }));
  EXPECT_FALSE(memory.prepared(99)) << "another layout";
  Taken taken = take(memory, PieceMemory::kBuffers, 90);
  EXPECT_EQ(maker.made, PieceMemory::kBuffers);
  taken.clear();
  memory.prepare({.bytes = 80});
  EXPECT_TRUE(memory.prepared(80)) << "larger ones do";
  EXPECT_EQ(maker.made, PieceMemory::kBuffers);
}

TEST(PieceMemory, ANewerLayoutReplacesOneThatIsBeingMade) {
  Maker maker;
  PieceMemory memory(Device::cpu(), true, maker.make());
  memory.prepare({.bytes = 100});
  maker.let.release();
  ASSERT_TRUE(soon([&] { return maker.begun == 2; }));
  memory.prepare({.bytes = 200});
  ASSERT_TRUE(soon([&] { return maker.stopped == 1 && maker.there == 0; }))
      << "what is too small goes back, before what is larger is there";
  maker.let.release(PieceMemory::kBuffers);
  ASSERT_TRUE(soon([&] { return memory.prepared(200); }));
  EXPECT_FALSE(memory.prepared(100));
  EXPECT_EQ(maker.there, PieceMemory::kBuffers);
}

TEST(PieceMemory, EndsInTheMiddleOfABuffer) {
  Maker maker;
  {
    PieceMemory memory(Device::cpu(), true, maker.make());
    memory.prepare({.bytes = 100});
    ASSERT_TRUE(soon([&] { return maker.begun == 1; }));
  }
  EXPECT_EQ(maker.stopped, 1);
}

TEST(PieceMemory, StopsWhereOthersShallNotBeHeldUpAndGoesOnWhenAsked) {
  Maker maker;
  PieceMemory memory(Device::cpu(), true, maker.make());
  maker.let.release(1);
  memory.prepare({.bytes = 100});
  ASSERT_TRUE(soon([&] { return maker.begun == 2; }));
  memory.stop_preparing();
  ASSERT_TRUE(soon([&] { return maker.stopped == 1; }));
  EXPECT_FALSE(memory.prepared(100));
  maker.let.release(100);
  memory.prepare({.bytes = 100});
  ASSERT_TRUE(soon([&] { return memory.prepared(100); }));
  EXPECT_EQ(maker.there, PieceMemory::kBuffers);
  memory.stop_preparing();
  EXPECT_TRUE(memory.prepared(100)) << "what is there stays";
}

TEST(PieceMemory, OutlivesItsMaker) {
  Maker maker;
  std::shared_ptr<const Tensor> taken;
  {
    PieceMemory memory(Device::cpu(), true, maker.make());
    maker.let.release();
    taken = memory.take(100, 100);
  }
  EXPECT_EQ(maker.there, 1);
  taken.reset();
  EXPECT_EQ(maker.there, 0);
}

TEST(PieceMemory, IsNotPreparedWhereItCannotBeMade) {
  Maker maker;
  PieceMemory memory(Device::cpu(), true, maker.make());
  maker.fail = true;
  maker.let.release();
  memory.prepare({.bytes = 100});
  ASSERT_TRUE(soon([&] { return maker.begun == 1; }));
  maker.let.release(100);
  maker.fail = false;
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(maker.begun, 1) << "it is not tried over and over";
  EXPECT_FALSE(memory.prepared(100));
  memory.prepare({.bytes = 100});
  EXPECT_TRUE(soon([&] { return memory.prepared(100); }));
}

TEST(PieceMemory, LeavesATenthOfTheHostsMemoryAlone) {
  Maker maker;
  maker.let.release(100);
  PieceMemory memory(Device::cpu(), false, maker.make());
  EXPECT_EQ(memory.lacking(100), 400);
  memory.prepare({.bytes = 100, .lacking = 800, .available = 880});
  EXPECT_FALSE(memory.prepared(100));
  EXPECT_EQ(maker.begun, 0);
  memory.prepare({.bytes = 100, .lacking = 800, .available = 890});
  EXPECT_TRUE(memory.prepared(100)) << "where it costs nothing, at once";
  EXPECT_EQ(memory.lacking(100), 0);
  memory.prepare({.bytes = 100, .lacking = 800, .available = 0});
  EXPECT_TRUE(memory.prepared(100)) << "it is there already";
  EXPECT_EQ(memory.lacking(200), 400) << "what is too small goes back";
  memory.prepare({.bytes = 200, .lacking = 400, .available = 0});
  EXPECT_FALSE(memory.prepared(200));
  memory.prepare({.bytes = 200});
  EXPECT_TRUE(memory.prepared(200));
}

TEST(PieceMemory, HasRoomForANewMirrorBesideThePiecesOfTheLayoutBefore) {
  Maker maker;
  maker.let.release(100);
  PieceMemory memory(Device::cpu(), false, maker.make());
  memory.prepare({.bytes = 100});
  Taken before = take(memory, 3, 100);
  memory.prepare({.bytes = 90});
  EXPECT_TRUE(memory.prepared(90));
  const int made = maker.made;
  EXPECT_EQ(made, 5);
  Taken first = take(memory, 2, 90);
  before.clear();
  Taken second = take(memory, 2, 90);
  EXPECT_EQ(maker.made, made);
  first.clear();
  second.clear();
  EXPECT_EQ(maker.there, PieceMemory::kBuffers) << "no more than mirrors need is kept";
}

}  // namespace
}  // namespace muster
