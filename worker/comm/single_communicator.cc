#include "worker/comm/single_communicator.h"

#include <cstring>

#include "common/error.h"

namespace muster {
namespace {

class Done : public Work {
 public:
  void wait(const Stream&) override {}
};

void copy(TensorView to, ConstTensorView from) {
  MUSTER_CHECK(to.contiguous() && from.contiguous() && to.dtype() == from.dtype());
  MUSTER_CHECK(to.numel() == from.numel(), to.shape().to_string());
  if (to.numel() > 0 && to.raw() != from.raw()) std::memcpy(to.raw(), from.raw(), to.bytes());
}

}  // namespace

std::unique_ptr<Work> SingleCommunicator::all_gather(TensorView full, ConstTensorView shard) {
  check_alive();
  copy(full, shard);
  return std::make_unique<Done>();
}

std::unique_ptr<Work> SingleCommunicator::reduce_scatter(TensorView shard, TensorView full) {
  check_alive();
  copy(shard, full);
  return std::make_unique<Done>();
}

std::unique_ptr<Work> SingleCommunicator::all_reduce(TensorView values) {
  check_alive();
  MUSTER_CHECK(values.contiguous());
  return std::make_unique<Done>();
}

void SingleCommunicator::abort(const std::string& reason) noexcept {
  const std::lock_guard lock(mutex_);
  if (aborted_) return;
  aborted_ = true;
  reason_ = reason;
}

void SingleCommunicator::check_alive() const {
  const std::lock_guard lock(mutex_);
  if (aborted_) throw PeerError(reason_);
}

}  // namespace muster
