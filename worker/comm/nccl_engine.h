// One NCCL communicator, the stream that its collectives run on, and the thread that watches over
// both. Only for sources of builds with MUSTER_WITH_NCCL.
//
// The communicator is non-blocking: no NCCL call blocks, so one that waits for a peer can be given
// up. A kernel that waits for a peer cannot: it spins until NCCL is told to abort, which is the
// watching thread's part. That thread aborts when the connections of the host communicator break
// (a peer died, somebody called abort()), when NCCL reports an error, and when a collective takes
// too long.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/deadline.h"
#include "worker/comm/gloo_communicator.h"
#include "worker/comm/nccl_library.h"

namespace muster {

// Events without timing, used again and again.
class EventPool {
 public:
  ~EventPool();
  cudaEvent_t take();
  void give_back(cudaEvent_t event) noexcept;

 private:
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
};

// A collective that was put on the stream.
class NcclOperation {
 public:
  NcclOperation(std::shared_ptr<EventPool> pool, const char* what, size_t bytes);
  ~NcclOperation();
  NcclOperation(const NcclOperation&) = delete;
  NcclOperation& operator=(const NcclOperation&) = delete;

  std::string name() const;                     // "all_gather of 67108864 bytes"
  cudaEvent_t ready() const { return ready_; }  // the stream that it waits for has come to the call
  cudaEvent_t done() const { return done_; }

 private:
  std::shared_ptr<EventPool> pool_;
  const char* what_;
  size_t bytes_;
  cudaEvent_t ready_;
  cudaEvent_t done_;
};

class NcclEngine : public std::enable_shared_from_this<NcclEngine> {
 public:
  using Call = std::function<ncclResult_t(ncclComm_t, cudaStream_t)>;

  // `host` connects the same ranks; `compute` is a stream of the current device.
  NcclEngine(std::shared_ptr<GlooCommunicator> host, cudaStream_t compute, double timeout_s);
  // close() has been called.
  ~NcclEngine();
  NcclEngine(const NcclEngine&) = delete;
  NcclEngine& operator=(const NcclEngine&) = delete;

  // Connects to the other ranks, on whatever thread. Collective. Neither waits for the compute
  // stream nor puts anything on it: that may belong to a generation that still trains. Throws
  // PeerError or TimeoutError.
  void connect(const ncclUniqueId& id);
  // Puts a collective on the stream, behind what the compute stream has been given so far.
  std::shared_ptr<NcclOperation> enqueue(const char* what, size_t bytes, const Call& call);
  // Blocks until it is complete. Throws as check_alive().
  void finish(const NcclOperation& operation);
  // Orders what follows on the compute stream behind it.
  void order(const NcclOperation& operation) noexcept;
  void check_alive() const;
  double wait_seconds() const;
  // Wakes the watching thread, which sees what the host communicator has to say.
  void wake() noexcept;
  // Takes leave of the peers, or aborts what is still under way. Returns within seconds; a thread
  // that is stuck in the driver is left behind.
  void close() noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  // Puts a collective on the stream, behind what the stream `before` has been given so far.
  std::shared_ptr<NcclOperation> enqueue_behind(cudaStream_t before, const char* what, size_t bytes,
                                                const Call& call);
  // Calls NCCL and polls until that has taken effect, or one of its ends has come.
  void call(const std::string& name, const std::function<ncclResult_t()>& function);
  ncclResult_t progress();
  // Ends everything: the reason is what every rank's error is made of.
  void fail(const std::string& reason) noexcept;
  void fail_late(const std::string& name);
  void fail(const std::string& name, ncclResult_t status);
  bool alive() const noexcept;
  void count_wait(Clock::time_point since);

  // On the watching thread.
  void watch() noexcept;
  void look();
  void look_at_operations();
  bool drained(Deadline deadline);
  void take_leave();

  const std::shared_ptr<GlooCommunicator> host_;
  const cudaStream_t compute_;
  const double timeout_s_;
  int device_ = 0;
  cudaStream_t stream_ = nullptr;
  const std::shared_ptr<EventPool> pool_ = std::make_shared<EventPool>();

  std::mutex communicator_mutex_;  // held for every NCCL call but the last one
  ncclComm_t communicator_ = nullptr;

  // The watching thread's own.
  std::optional<Clock::time_point> oldest_since_;    // when the oldest operation could begin
  std::optional<Clock::time_point> departed_since_;  // when a peer was first seen to have left

  mutable std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::deque<std::shared_ptr<NcclOperation>> under_way_;
  std::string late_;  // which collective took too long
  int64_t waited_ns_ = 0;
  bool awake_ = false;
  bool closing_ = false;
  bool ended_ = false;  // the thread has let go of the communicator
  std::thread thread_;
};

}  // namespace muster
