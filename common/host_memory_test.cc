#include "common/host_memory.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "common/files.h"

namespace muster {
namespace {

class HostMemoryTest : public testing::Test {
 protected:
  void write(const std::string& path, const std::string& text) const {
    const std::filesystem::path full = root_.path() + path;
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full) << text;
  }
  void write_meminfo() const {
    write("/proc/meminfo", "MemTotal:       1000 kB\nMemFree:  5 kB\nMemAvailable:    800 kB\n");
  }
  std::optional<size_t> available() const { return available_host_memory(root_.path()); }

  TempDir root_;
};

TEST_F(HostMemoryTest, IsWhatTheKernelSays) {
  EXPECT_EQ(available(), std::nullopt);
  write_meminfo();
  EXPECT_EQ(available(), 800U * 1024);
}

TEST_F(HostMemoryTest, IsBoundedByTheNarrowestCgroupOfVersion2) {
  write_meminfo();
  write("/proc/self/cgroup", "0::/job/step/task\n");
  const std::string job = "/sys/fs/cgroup/job";
  write(job + "/step/task/memory.max", "max\n");
  write(job + "/step/task/memory.current", "50\n");
  EXPECT_EQ(available(), 800U * 1024);
  write(job + "/memory.max", "70000\n");
  write(job + "/memory.current", "60000\n");
  EXPECT_EQ(available(), 10000U);
  // What was read from files lies in the cache until somebody needs the room.
  write(job + "/memory.stat", "anon 20000\nfile 40000\ninactive_file 35000\nactive_file 5000\n");
  EXPECT_EQ(available(), 45000U);
  write(job + "/step/memory.max", "100\n");
  write(job + "/step/memory.current", "120\n");
  EXPECT_EQ(available(), 0U);
}

TEST_F(HostMemoryTest, IsBoundedByACgroupOfVersion1) {
  write_meminfo();
  write("/proc/self/cgroup", "12:cpu,cpuacct:/other\n4:memory:/docker/0123\n1:name=systemd:/x\n");
  // A container sees its own as the topmost one.
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "50000\n");
  write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "20000\n");
  write("/sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 5000\n");
  EXPECT_EQ(available(), 35000U);
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");  // none
  EXPECT_EQ(available(), 800U * 1024);
}

TEST(HostMemory, IsKnownOfThisHost) {
  const auto available = available_host_memory();
  ASSERT_TRUE(available);
  EXPECT_GT(*available, size_t{1} << 20);
}

}  // namespace
}  // namespace muster
