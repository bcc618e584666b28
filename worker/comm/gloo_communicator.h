// Communicator over Gloo's TCP transport. One thread runs the collectives in the order in which
// they were asked for, so that they overlap the caller's compute.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <queue>
#include <thread>

#include "worker/comm/communicator.h"
#include "worker/comm/gloo_mesh.h"

namespace muster {

class GlooCommunicator : public Communicator {
 public:
  // Meets the others through `store`. Throws ConfigError, PeerError or TimeoutError.
  GlooCommunicator(const CommunicatorOptions& options, Store& store);
  // Aborts what is still under way. Every Work must be gone.
  ~GlooCommunicator() override;

  int rank() const override { return mesh_.rank(); }
  int world_size() const override { return mesh_.world_size(); }
  std::unique_ptr<Work> all_gather(TensorView full, ConstTensorView shard) override;
  std::unique_ptr<Work> reduce_scatter(TensorView shard, TensorView full) override;
  std::unique_ptr<Work> all_reduce(TensorView values) override;
  std::unique_ptr<Work> exchange(std::vector<Parcel> outgoing,
                                 std::vector<Parcel> incoming) override;
  void barrier() override;
  void abort(const std::string& reason) noexcept override { mesh_.abort(reason); }
  void check_alive() const override { mesh_.check_alive(); }
  // Ranks that have closed their communicator in good order, so that nothing more will come of
  // them: "rank 1"; "" when there is none.
  std::string departed() const { return mesh_.departed(); }
  double wait_seconds() const override { return static_cast<double>(waited_ns_.load()) * 1e-9; }

 private:
  class Pending;
  struct Task {
    std::function<void(Deadline)> collective;
    std::promise<void> done;
  };
  // `collective` gets the deadline that begins when its turn comes.
  std::unique_ptr<Work> enqueue(std::function<void(Deadline)> collective);
  void run_queue();

  GlooMesh mesh_;
  const double timeout_s_;
  std::atomic<int64_t> waited_ns_{0};

  std::mutex mutex_;
  std::condition_variable changed_;
  std::queue<Task> queue_;
  int unfinished_ = 0;  // in the queue or running
  bool stopping_ = false;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace muster
