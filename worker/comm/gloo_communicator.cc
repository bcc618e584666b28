#include "worker/comm/gloo_communicator.h"

#include <signal.h>

#include <chrono>
#include <utility>

#include "worker/comm/gloo_collectives.h"

namespace muster {

class GlooCommunicator::Pending : public Work {
 public:
  Pending(std::future<void> done, std::atomic<int64_t>& waited_ns)
      : done_(std::move(done)), waited_ns_(waited_ns) {}
  // The buffers may go away after this, so the collective must be over; it has a deadline.
  ~Pending() override {
    if (done_.valid()) done_.wait();
  }
  void wait(const Stream&) override {
    MUSTER_CHECK(done_.valid());
    const auto begin = std::chrono::steady_clock::now();
    done_.wait();
    waited_ns_ += std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin).count();
    done_.get();
  }

 private:
  std::future<void> done_;
  std::atomic<int64_t>& waited_ns_;
};

GlooCommunicator::GlooCommunicator(const CommunicatorOptions& options, Store& store)
    : mesh_(options, store), timeout_s_(options.timeout_s), thread_([this] { run_queue(); }) {}

GlooCommunicator::~GlooCommunicator() {
  bool busy = false;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    busy = unfinished_ > 0;
  }
  if (busy) mesh_.abort("the communicator is closed");
  changed_.notify_one();
  thread_.join();
}

std::unique_ptr<Work> GlooCommunicator::enqueue(std::function<void(Deadline)> collective) {
  mesh_.check_alive();
  Task task{std::move(collective), {}};
  auto pending = std::make_unique<Pending>(task.done.get_future(), waited_ns_);
  {
    const std::lock_guard lock(mutex_);
    queue_.push(std::move(task));
    ++unfinished_;
  }
  changed_.notify_one();
  return pending;
}

void GlooCommunicator::run_queue() {
  // Gloo sends small messages from this thread; a dead peer must not end the process.
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);

  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Task task = std::move(queue_.front());
    queue_.pop();
    lock.unlock();
    std::exception_ptr error;
    try {
      mesh_.check_alive();
      task.collective(Deadline::after(std::chrono::duration<double>(timeout_s_)));
    } catch (...) {
      error = std::current_exception();
    }
    // Counted before the waiter is told, so that whoever has waited for everything may close us.
    lock.lock();
    --unfinished_;
    if (error) {
      task.done.set_exception(error);
    } else {
      task.done.set_value();
    }
  }
}

std::unique_ptr<Work> GlooCommunicator::all_gather(TensorView full, ConstTensorView shard) {
  return enqueue(
      [this, full, shard](Deadline deadline) { muster::all_gather(mesh_, full, shard, deadline); });
}

std::unique_ptr<Work> GlooCommunicator::reduce_scatter(TensorView shard, TensorView full) {
  return enqueue([this, shard, full](Deadline deadline) {
    muster::reduce_scatter(mesh_, shard, full, deadline);
  });
}

std::unique_ptr<Work> GlooCommunicator::all_reduce(TensorView values) {
  return enqueue(
      [this, values](Deadline deadline) { muster::all_reduce(mesh_, values, deadline); });
}

std::unique_ptr<Work> GlooCommunicator::exchange(std::vector<Parcel> outgoing,
                                                 std::vector<Parcel> incoming) {
  for (const auto* parcels : {&outgoing, &incoming}) {
    check_parcels(*parcels, rank(), world_size(), Device::cpu());
  }
  return enqueue([this, outgoing = std::move(outgoing), incoming = std::move(incoming)](
                     Deadline deadline) { muster::exchange(mesh_, outgoing, incoming, deadline); });
}

void GlooCommunicator::barrier() {
  enqueue([this](Deadline deadline) { muster::barrier(mesh_, deadline); })->wait(Stream::cpu());
}

}  // namespace muster
