// Host memory straight from the system, for buffers of GBs: in huge pages where there are any, and
// given back as a whole.
#pragma once

#include <cstddef>
#include <stop_token>

namespace muster {

class MappedMemory {
 public:
  // At least `bytes`, aligned to pages. Its pages come when they are touched. Throws Error.
  explicit MappedMemory(size_t bytes);
  ~MappedMemory();
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  // Makes the system provide all pages, in a few threads: one alone clears some GB a second. False
  // if `stop` was requested before the end.
  bool touch(const std::stop_token& stop = {});

 private:
  size_t bytes_;
  void* data_;
};

}  // namespace muster
