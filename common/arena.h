// One range of memory, cut into blocks: what a training step's tensors come from, so that nothing
// is allocated inside a step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/tensor.h"

namespace muster {

// Smallest free block that fits, with neighbours merged; the untouched end of the range is taken
// only when none does. Where a block comes to lie is thus a function of the requests alone and not
// of the range's size: a dry run over a made-up range (`plan()`) tells how large the real one must
// be. Blocks are 512-byte aligned. Thread-safe.
class Arena : public Allocator {
 public:
  // Requests that do not fit go to `overflow`, or throw std::bad_alloc without one. `memory` is the
  // range.
  Arena(Device device, std::shared_ptr<void> memory, size_t bytes,
        std::shared_ptr<Allocator> overflow = nullptr);
  // An endless range of made-up addresses on the plan device.
  static std::shared_ptr<Arena> plan();
  ~Arena() override;

  std::shared_ptr<void> allocate(size_t bytes) override;
  Device device() const override { return device_; }
  size_t bytes_in_use() const;
  // End of the last byte ever used: what the range needs.
  size_t extent() const;
  // Requests that went to `overflow`.
  int64_t overflows() const;

 private:
  struct State;
  Device device_;
  std::shared_ptr<State> state_;
};

}  // namespace muster
