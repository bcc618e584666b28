// The communicator of a run with one worker: every collective is complete when it returns, or, of
// GPU tensors, enqueued on the stream that computes.
#pragma once

#include <mutex>
#include <string>

#include "worker/comm/communicator.h"

namespace muster {

class SingleCommunicator : public Communicator {
 public:
  explicit SingleCommunicator(const Stream& stream = Stream::cpu()) : stream_(stream) {}
  int rank() const override { return 0; }
  int world_size() const override { return 1; }
  std::unique_ptr<Work> all_gather(TensorView full, ConstTensorView shard) override;
  std::unique_ptr<Work> reduce_scatter(TensorView shard, TensorView full) override;
  std::unique_ptr<Work> all_reduce(TensorView values) override;
  std::unique_ptr<Work> exchange(std::vector<Parcel> outgoing,
                                 std::vector<Parcel> incoming) override;
  void barrier() override { check_alive(); }
  void abort(const std::string& reason) noexcept override;
  void check_alive() const override;
  double wait_seconds() const override { return 0.0; }

 private:
  std::unique_ptr<Work> copy(TensorView to, ConstTensorView from) const;

  const Stream stream_;
  mutable std::mutex mutex_;
  bool aborted_ = false;
  std::string reason_;
};

}  // namespace muster
