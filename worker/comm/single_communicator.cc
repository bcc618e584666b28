#include "worker/comm/single_communicator.h"

#include <cstring>

#include "common/error.h"
#ifdef MUSTER_WITH_CUDA
#include "kernels/cuda/check.h"
#endif

namespace muster {
namespace {

#ifdef MUSTER_WITH_CUDA
// Complete when `own` is; another stream is made to wait for that.
class Enqueued : public Work {
 public:
  explicit Enqueued(const Stream& own) : own_(own) {}
  void wait(const Stream& stream) override {
    const auto own = static_cast<cudaStream_t>(own_.handle);
    if (stream.device.is_cpu()) {
      CUDA_CHECK(cudaStreamSynchronize(own));
    } else if (stream.handle != own_.handle) {
      cudaEvent_t now = nullptr;
      CUDA_CHECK(cudaEventCreateWithFlags(&now, cudaEventDisableTiming));
      const cudaError_t recorded = cudaEventRecord(now, own);
      const cudaError_t waited =
          recorded != cudaSuccess
              ? recorded
              : cudaStreamWaitEvent(static_cast<cudaStream_t>(stream.handle), now, 0);
      CUDA_CHECK(cudaEventDestroy(now));
      CUDA_CHECK(waited);
    }
  }

 private:
  Stream own_;
};
#endif

}  // namespace

std::unique_ptr<Work> SingleCommunicator::copy(TensorView to, ConstTensorView from) const {
  check_alive();
  MUSTER_CHECK(to.contiguous() && from.contiguous() && to.dtype() == from.dtype());
  MUSTER_CHECK(to.numel() == from.numel(), to.shape().to_string());
  MUSTER_CHECK(to.device() == from.device());
  MUSTER_CHECK(to.device().is_cpu() || to.device() == stream_.device, "a tensor of another GPU");
  const bool in_place = to.numel() == 0 || to.raw() == from.raw();
#ifdef MUSTER_WITH_CUDA
  if (!to.device().is_cpu()) {
    if (!in_place) {
      CUDA_CHECK(cudaMemcpyAsync(to.raw(), from.raw(), to.bytes(), cudaMemcpyDeviceToDevice,
                                 static_cast<cudaStream_t>(stream_.handle)));
    }
    return std::make_unique<Enqueued>(stream_);
  }
#endif
  MUSTER_CHECK(to.device().is_cpu(), "built without CUDA");
  if (!in_place) std::memcpy(to.raw(), from.raw(), to.bytes());
  return completed_work();
}

std::unique_ptr<Work> SingleCommunicator::all_gather(TensorView full, ConstTensorView shard) {
  return copy(full, shard);
}

std::unique_ptr<Work> SingleCommunicator::reduce_scatter(TensorView shard, TensorView full) {
  return copy(shard, full);
}

std::unique_ptr<Work> SingleCommunicator::all_reduce(TensorView values) {
  return copy(values, values);
}

std::unique_ptr<Work> SingleCommunicator::exchange(std::vector<Parcel> outgoing,
                                                   std::vector<Parcel> incoming) {
  check_alive();
  MUSTER_CHECK(outgoing.empty() && incoming.empty(), "one rank has no peers");
  return completed_work();
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
