#include "kernels/runtime/mapped_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace muster {
namespace {

size_t resident_pages(const MappedMemory& memory) {
  std::vector<unsigned char> pages(memory.bytes() / 4096);
  EXPECT_EQ(::mincore(memory.data(), memory.bytes(), pages.data()), 0);
  return static_cast<size_t>(
      std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return page & 1U; }));
}

TEST(MappedMemory, IsThereOnceItIsTouched) {
  constexpr size_t kBytes = (size_t{100} << 20) + 12345;
  MappedMemory memory(kBytes);
  ASSERT_GE(memory.bytes(), kBytes);
  EXPECT_EQ(resident_pages(memory), 0u);
  EXPECT_TRUE(memory.touch());
  EXPECT_EQ(resident_pages(memory), memory.bytes() / 4096);
  std::memset(memory.data(), 7, kBytes);
}

TEST(MappedMemory, IsNotTouchedOnceThatIsStopped) {
  MappedMemory memory(size_t{100} << 20);
  std::stop_source stop;
  stop.request_stop();
  EXPECT_FALSE(memory.touch(stop.get_token()));
  EXPECT_EQ(resident_pages(memory), 0u);
}

}  // namespace
}  // namespace muster
