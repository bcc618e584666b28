#include "kernels/runtime/mapped_memory.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>
#include <vector>

#include "common/error.h"

namespace muster {

namespace {

constexpr size_t kPage = 4096;  // the smallest; where huge ones are had, most touches find them
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kSlice = 16 * kHugePage;  // between looks at `stop`: some ms
constexpr unsigned kThreads = 4;

}  // namespace

MappedMemory::MappedMemory(size_t bytes)
    : bytes_((std::max<size_t>(bytes, 1) + kHugePage - 1) / kHugePage * kHugePage),
      data_(::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
  if (data_ == MAP_FAILED) {
    throw Error(fmt::format("cannot map {} bytes of memory: {}", bytes_, std::strerror(errno)));
  }
  // Only a wish: without huge pages everything works, and takes longer.
  ::madvise(data_, bytes_, MADV_HUGEPAGE);
}

MappedMemory::~MappedMemory() {
  ::munmap(data_, bytes_);
}

bool MappedMemory::touch(const std::stop_token& stop) {
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t at = 0; !stop.stop_requested() && (at = next.fetch_add(kSlice)) < bytes_;) {
      auto* begin = static_cast<volatile char*>(data_) + at;
      for (size_t i = 0; i < std::min(kSlice, bytes_ - at); i += kPage) begin[i] = 0;
    }
  };
  std::vector<std::jthread> threads;
  const unsigned cores = std::max(1U, std::thread::hardware_concurrency());
  for (unsigned i = 1; i < std::min(kThreads, cores); ++i) threads.emplace_back(work);
  work();
  threads.clear();
  return !stop.stop_requested();
}

}  // namespace muster
