#ifdef MUSTER_WITH_NCCL

#include "worker/comm/nccl_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "common/error.h"
#include "kernels/cuda/check.h"

namespace muster {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kInterval(10);
// A peer's death breaks NCCL's connections and the host's at about the same time. The latter say
// whose it was, so NCCL's own error waits for them.
constexpr milliseconds kBlameGrace(200);
// Once a peer has left in good order, what it took part in is complete, here but for a moment.
constexpr std::chrono::seconds kDepartedGrace(1);
constexpr std::chrono::seconds kLeaveTimeout(3);
constexpr std::chrono::seconds kCloseTimeout(10);
// What peers may still fetch from this rank's memory when its own part of the last collective is
// complete: they take part in it already, and microseconds are enough.
constexpr milliseconds kPeersGrace(20);
// A call takes effect on a thread of NCCL's, most often within a tenth of this. Sleeping would take
// longer than that.
constexpr std::chrono::microseconds kSpin(500);
constexpr std::chrono::microseconds kPause(50);

std::string in_seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g s", seconds);
  return text;
}

void pause(std::chrono::steady_clock::time_point since) {
  if (std::chrono::steady_clock::now() - since < kSpin) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace

EventPool::~EventPool() {
  for (const cudaEvent_t event : free_) cudaEventDestroy(event);
}

cudaEvent_t EventPool::take() {
  const std::lock_guard lock(mutex_);
  cudaEvent_t event = nullptr;
  if (free_.empty()) {
    CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  } else {
    event = free_.back();
    free_.pop_back();
  }
  return event;
}

void EventPool::give_back(cudaEvent_t event) noexcept {
  const std::lock_guard lock(mutex_);
  free_.push_back(event);
}

NcclOperation::NcclOperation(std::shared_ptr<EventPool> pool, const char* what, size_t bytes)
    : pool_(std::move(pool)),
      what_(what),
      bytes_(bytes),
      ready_(pool_->take()),
      done_(pool_->take()) {}

NcclOperation::~NcclOperation() {
  pool_->give_back(ready_);
  pool_->give_back(done_);
}

std::string NcclOperation::name() const {
  return std::string(what_) + " of " + std::to_string(bytes_) + " bytes";
}

NcclEngine::NcclEngine(std::shared_ptr<GlooCommunicator> host, cudaStream_t compute,
                       double timeout_s)
    : host_(std::move(host)), compute_(compute), timeout_s_(timeout_s) {
  CUDA_CHECK(cudaGetDevice(&device_));
  int least = 0;
  int greatest = 0;
  CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  // High: a collective that waits for free multiprocessors makes every peer wait.
  CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
}

NcclEngine::~NcclEngine() {
  MUSTER_CHECK(!thread_.joinable(), "an engine that was not closed");
}

void NcclEngine::connect(const ncclUniqueId& id) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  call("connecting NCCL", [&] {
    const ncclResult_t status =
        nccl().CommInitRankConfig(&communicator_, host_->world_size(), id, host_->rank(), &config);
    thread_ = std::thread([self = shared_from_this()] { self->watch(); });
    return status;
  });
  // NCCL connects the GPUs when they first have something to say to each other. Better now, where a
  // deadline that begins on all ranks at once covers it, than inside of the first step.
  const size_t size = host_->world_size();
  void* bytes = nullptr;
  CUDA_CHECK(cudaMallocAsync(&bytes, size, stream_));
  const auto give_back = [this](void* memory) { cudaFreeAsync(memory, stream_); };
  const std::unique_ptr<void, decltype(give_back)> owner(bytes, give_back);
  const auto first =
      enqueue_behind(stream_, "connecting NCCL: all_gather", size,
                     [&](ncclComm_t communicator, cudaStream_t stream) {
                       return nccl().AllGather(static_cast<char*>(bytes) + host_->rank(), bytes, 1,
                                               ncclUint8, communicator, stream);
                     });
  finish(*first);
}

std::shared_ptr<NcclOperation> NcclEngine::enqueue(const char* what, size_t bytes,
                                                   const Call& function) {
  return enqueue_behind(compute_, what, bytes, function);
}

std::shared_ptr<NcclOperation> NcclEngine::enqueue_behind(cudaStream_t before, const char* what,
                                                          size_t bytes, const Call& function) {
  check_alive();
  auto operation = std::make_shared<NcclOperation>(pool_, what, bytes);
  CUDA_CHECK(cudaEventRecord(operation->ready(), before));
  CUDA_CHECK(cudaStreamWaitEvent(stream_, operation->ready(), 0));
  call(operation->name(), [&] {
    // Null when it is being ended: check_alive() will tell.
    return communicator_ == nullptr ? ncclInProgress : function(communicator_, stream_);
  });
  CUDA_CHECK(cudaEventRecord(operation->done(), stream_));
  const std::lock_guard lock(mutex_);
  under_way_.push_back(operation);
  return operation;
}

void NcclEngine::call(const std::string& name, const std::function<ncclResult_t()>& function) {
  const Clock::time_point begin = Clock::now();
  const Deadline deadline = Deadline::after(std::chrono::duration<double>(timeout_s_));
  ncclResult_t status = ncclInProgress;
  {
    const std::lock_guard lock(communicator_mutex_);
    status = function();
  }
  while (status == ncclInProgress) {
    pause(begin);
    check_alive();
    if (deadline.passed()) {
      fail_late(name);
      check_alive();
    }
    if (Clock::now() - begin > kDepartedGrace) {
      const std::string departed = host_->departed();
      if (!departed.empty()) fail(fmt::format("{}: {} left", name, departed));
    }
    status = progress();
  }
  count_wait(begin);
  if (status != ncclSuccess) {
    fail(name, status);
    check_alive();
  }
}

ncclResult_t NcclEngine::progress() {
  const std::lock_guard lock(communicator_mutex_);
  if (communicator_ == nullptr) return ncclInProgress;  // as in enqueue()
  ncclResult_t status = ncclSuccess;
  const ncclResult_t asked = nccl().CommGetAsyncError(communicator_, &status);
  return asked == ncclSuccess ? status : asked;
}

void NcclEngine::finish(const NcclOperation& operation) {
  const Clock::time_point begin = Clock::now();
  for (;;) {
    const cudaError_t status = cudaEventQuery(operation.done());
    if (status == cudaSuccess) break;
    if (status != cudaErrorNotReady) CUDA_CHECK(status);
    cudaGetLastError();  // the next launch on this thread shall not report it
    check_alive();
    pause(begin);
  }
  count_wait(begin);
  check_alive();
}

void NcclEngine::order(const NcclOperation& operation) noexcept {
  cudaStreamWaitEvent(compute_, operation.done(), 0);
}

void NcclEngine::check_alive() const {
  {
    const std::lock_guard lock(mutex_);
    if (!late_.empty()) throw TimeoutError(late_);
  }
  host_->check_alive();
}

bool NcclEngine::alive() const noexcept {
  try {
    check_alive();
    return true;
  } catch (const PeerError&) {
    return false;
  }
}

void NcclEngine::fail(const std::string& reason) noexcept {
  host_->abort(reason);
  wake();
}

void NcclEngine::fail_late(const std::string& name) {
  const std::string reason = name + ": not complete within " + in_seconds(timeout_s_) +
                             ": a rank has not called it, or its GPU hangs";
  if (alive()) {
    const std::lock_guard lock(mutex_);
    late_ = reason;
  }
  fail(reason);
}

void NcclEngine::fail(const std::string& name, ncclResult_t status) {
  std::string reason = name + ": " + nccl().GetErrorString(status);
  if (const char* detail = nccl().GetLastError(nullptr); detail != nullptr && *detail != '\0') {
    reason += std::string(" (") + detail + ")";
  }
  for (const Deadline grace = Deadline::after(kBlameGrace); alive() && !grace.passed();) {
    std::this_thread::sleep_for(kInterval);
  }
  const std::string departed = host_->departed();
  fail(departed.empty() ? reason : name + ": " + departed + " left");
}

double NcclEngine::wait_seconds() const {
  const std::lock_guard lock(mutex_);
  return static_cast<double>(waited_ns_) * 1e-9;
}

void NcclEngine::count_wait(Clock::time_point since) {
  const std::lock_guard lock(mutex_);
  waited_ns_ += std::chrono::nanoseconds(Clock::now() - since).count();
}

void NcclEngine::wake() noexcept {
  {
    const std::lock_guard lock(mutex_);
    awake_ = true;
  }
  changed_.notify_all();
}

void NcclEngine::close() noexcept {
  if (!thread_.joinable()) {
    cudaStreamDestroy(stream_);
    return;
  }
  std::unique_lock lock(mutex_);
  closing_ = true;
  changed_.notify_all();
  if (changed_.wait_for(lock, kCloseTimeout, [this] { return ended_; })) {
    lock.unlock();
    thread_.join();
    cudaStreamDestroy(stream_);
    return;
  }
  std::fprintf(stderr, "rank %d: NCCL did not end within %s; its thread is left behind\n",
               host_->rank(), in_seconds(kCloseTimeout.count()).c_str());
  thread_.detach();
}

void NcclEngine::watch() noexcept {
  cudaSetDevice(device_);
  // Asking for an event's state must not spoil the capture of a graph on another thread.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  std::unique_lock lock(mutex_);
  while (!closing_) {
    changed_.wait_for(lock, kInterval, [this] { return closing_ || awake_; });
    awake_ = false;
    lock.unlock();
    // Once ended no call to CUDA: another thread may wait inside one until we have aborted.
    if (alive()) look();
    const bool going_on = alive();
    lock.lock();
    if (!going_on) break;
  }
  lock.unlock();
  take_leave();
  lock.lock();
  ended_ = true;
  changed_.notify_all();
}

void NcclEngine::look() {
  const ncclResult_t status = progress();
  if (status != ncclSuccess && status != ncclInProgress) {
    fail("NCCL", status);
    return;
  }
  look_at_operations();
}

void NcclEngine::look_at_operations() {
  const Clock::time_point now = Clock::now();
  if (!departed_since_ && !host_->departed().empty()) departed_since_ = now;
  std::shared_ptr<NcclOperation> oldest;
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      if (under_way_.empty()) return;
      oldest = under_way_.front();
    }
    const cudaError_t status = cudaEventQuery(oldest->done());
    if (status == cudaErrorNotReady) break;
    if (status != cudaSuccess) {
      cudaGetLastError();
      fail(oldest->name() + ": GPU " + std::to_string(device_) + ": " + cudaGetErrorString(status));
      return;
    }
    oldest_since_.reset();
    const std::lock_guard lock(mutex_);
    under_way_.pop_front();
  }
  // Time that the stream before it takes to come to the call is not the collective's.
  if (!oldest_since_ && cudaEventQuery(oldest->ready()) == cudaSuccess) oldest_since_ = now;
  if (!oldest_since_) return;
  if (now - *oldest_since_ > std::chrono::duration<double>(timeout_s_)) {
    fail_late(oldest->name());
  } else if (departed_since_ && now - std::max(*departed_since_, *oldest_since_) > kDepartedGrace) {
    fail(oldest->name() + ": " + host_->departed() + " left");
  }
}

bool NcclEngine::drained(Deadline deadline) {
  while (alive()) {
    look_at_operations();
    {
      const std::lock_guard lock(mutex_);
      if (under_way_.empty()) return true;
    }
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return false;
}

void NcclEngine::take_leave() {
  const Deadline deadline = Deadline::after(kLeaveTimeout);
  const bool in_order = drained(Deadline::after(kDepartedGrace));
  ncclComm_t communicator = nullptr;
  {
    const std::lock_guard lock(communicator_mutex_);
    communicator = std::exchange(communicator_, nullptr);
  }
  if (communicator == nullptr) return;
  if (in_order) {
    ncclResult_t status = nccl().CommFinalize(communicator);
    while (status == ncclInProgress && alive() && !deadline.passed()) {
      std::this_thread::sleep_for(milliseconds(1));
      if (nccl().CommGetAsyncError(communicator, &status) != ncclSuccess) break;
    }
    std::this_thread::sleep_for(kPeersGrace);
  }
  // Not ncclCommDestroy: that waits until every peer has destroyed its communicator too, for ever
  // if one has no mind to (seen with NCCL 2.28).
  if (const ncclResult_t status = nccl().CommAbort(communicator); status != ncclSuccess) {
    std::fprintf(stderr, "rank %d: NCCL does not end: %s\n", host_->rank(),
                 nccl().GetErrorString(status));
  }
  const std::lock_guard lock(mutex_);
  under_way_.clear();
}

}  // namespace muster

#endif  // MUSTER_WITH_NCCL
