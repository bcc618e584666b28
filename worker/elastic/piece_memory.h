// The host memory that pieces of training state lie in. Buffers that a GPU copies to take seconds
// to make, so those of mirrors are made before they are needed, on a thread of this class, and what
// is too small for a new layout is given back there. Plain host memory costs nothing until it is
// touched and is made at once. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>

#include "common/tensor.h"

namespace muster {

class PieceMemory {
 public:
  // Of mirrors: one for the own piece and one for the ward's, twice, as the version before is kept
  // until nobody needs it.
  static constexpr int kBuffers = 4;

  // A buffer of so many bytes; undefined if stop is requested meanwhile.
  using Make = std::function<Tensor(int64_t bytes, const std::stop_token& stop)>;
  // Memory for copies from and to `device`.
  explicit PieceMemory(Device device);
  // `background`: buffers take long to make.
  PieceMemory(Device device, bool background, Make make);
  ~PieceMemory();
  PieceMemory(const PieceMemory&) = delete;
  PieceMemory& operator=(const PieceMemory&) = delete;

  // A buffer of at least `least` bytes. Where none is idle it is made, with `bytes` of them. The
  // last owner of it must have dropped all copies of the tensor.
  std::shared_ptr<const Tensor> take(int64_t least, int64_t bytes);

  struct Wanted {
    int64_t bytes = 0;  // of each buffer
    // Bytes that processes of this host lack for theirs, this one included, and bytes that it has,
    // of which a tenth is left alone; nullopt: to be tried regardless.
    int64_t lacking = 0;
    std::optional<size_t> available = std::nullopt;
  };
  // Bytes that this process lacks for buffers of so many.
  int64_t lacking(int64_t bytes) const;
  // Makes what is missing of kBuffers. Replaces what an earlier call wanted. Where they do not fit
  // nothing is made, and the log says so once.
  void prepare(const Wanted& wanted);
  // Makes no more, and ends soon what is being made: nobody waits for it, and it would hold up
  // those who use the driver.
  void stop_preparing();
  // What was wanted last has buffers of so many bytes, and take() need not make any: of the first
  // two at once, and of the others once pieces of the layout before are gone.
  bool prepared(int64_t bytes) const;

 private:
  struct State;
  void run();
  bool fits(const Wanted& wanted);
  void make_one(std::unique_lock<std::mutex>& lock);

  const std::shared_ptr<State> state_;  // also of those who have taken a buffer
  const Device device_;
  const bool background_;
  const Make make_;
  bool warned_ = false;
  std::thread thread_;  // from the first prepare() on, where there is a background
};

}  // namespace muster
