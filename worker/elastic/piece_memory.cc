#include "worker/elastic/piece_memory.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <iterator>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/logging.h"
#include "kernels/runtime/runtime.h"

namespace muster {

struct PieceMemory::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Tensor> idle;
  std::multiset<int64_t> taken;   // sizes
  std::vector<Tensor> discarded;  // to be given back to the system by the thread
  int64_t wanted = 0;             // bytes of each buffer
  int64_t prepared = 0;           // as wanted, once all are there
  int64_t making = 0;             // size of the one that the thread makes
  bool go = false;                // the thread is to make what is missing
  bool has_thread = false;
  bool closing = false;
  std::stop_source stop;  // of the one that is being made

  int64_t idle_buffers(int64_t bytes) const {
    return std::count_if(idle.begin(), idle.end(),
                         [=](const Tensor& one) { return one.numel() >= bytes; });
  }
  int64_t buffers(int64_t bytes) const {
    return idle_buffers(bytes) + std::distance(taken.lower_bound(bytes), taken.end());
  }
  // The first mirror of a layout takes two while pieces of the one before may still be held.
  int64_t missing(int64_t bytes) const {
    constexpr int64_t kAtOnce = 2;
    return std::max<int64_t>({kBuffers - buffers(bytes), kAtOnce - idle_buffers(bytes), 0});
  }
  int64_t missing() const { return missing(wanted); }
  void add(Tensor buffer) {
    if (buffer.numel() < wanted) return discarded.push_back(std::move(buffer));
    idle.push_back(std::move(buffer));
    if (missing() == 0) prepared = wanted;
  }
  void discard_small(int64_t least) {
    const auto small = std::partition(idle.begin(), idle.end(),
                                      [&](const Tensor& one) { return one.numel() >= least; });
    discarded.insert(discarded.end(), std::make_move_iterator(small),
                     std::make_move_iterator(idle.end()));
    idle.erase(small, idle.end());
  }
  // What was discarded, for the caller to drop once the lock is open; nothing where the thread
  // does.
  std::vector<Tensor> drop() {
    if (has_thread) {
      if (!discarded.empty()) changed.notify_all();
      return {};
    }
    return std::exchange(discarded, {});
  }

  void give_back(Tensor buffer) {
    std::vector<Tensor> dropped;  // before the lock: dropped after it
    const std::lock_guard lock(mutex);
    taken.erase(taken.find(buffer.numel()));
    const bool of_use = buffer.numel() >= wanted && buffers(wanted) < kBuffers;
    (of_use ? idle : discarded).push_back(std::move(buffer));
    dropped = drop();
  }
};

PieceMemory::PieceMemory(Device device)
    : PieceMemory(device, device.is_cuda(), [device](int64_t bytes, const std::stop_token& stop) {
        return host_buffer(device, bytes, stop);
      }) {}

PieceMemory::PieceMemory(Device device, bool background, Make make)
    : state_(std::make_shared<State>()),
      device_(device),
      background_(background),
      make_(std::move(make)) {}

PieceMemory::~PieceMemory() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->closing = true;
    state_->has_thread = false;
    state_->stop.request_stop();
  }
  state_->changed.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<const Tensor> PieceMemory::take(int64_t least, int64_t bytes) {
  Tensor buffer;
  std::vector<Tensor> dropped;
  {
    const std::lock_guard lock(state_->mutex);
    auto& idle = state_->idle;
    const auto found = std::find_if(idle.begin(), idle.end(),
                                    [&](const Tensor& one) { return one.numel() >= least; });
    if (found != idle.end()) {
      buffer = std::move(*found);
      idle.erase(found);
      state_->taken.insert(buffer.numel());
    } else {
      state_->discard_small(least);  // of a layout of more parts: of no use from now on
      dropped = state_->drop();
    }
  }
  dropped.clear();
  if (!buffer.defined()) {
    buffer = make_(bytes, {});
    const std::lock_guard lock(state_->mutex);
    state_->taken.insert(buffer.numel());
  }
  return std::shared_ptr<Tensor>(new Tensor(std::move(buffer)), [state = state_](Tensor* taken) {
    const std::unique_ptr<Tensor> owned(taken);
    state->give_back(std::move(*owned));
  });
}

void PieceMemory::prepare(const Wanted& wanted) {
  std::vector<Tensor> dropped;
  std::unique_lock lock(state_->mutex);
  if (state_->go && state_->wanted == wanted.bytes) return;  // under way
  state_->wanted = wanted.bytes;
  state_->prepared = 0;
  state_->discard_small(wanted.bytes);
  dropped = state_->drop();
  if (state_->making < wanted.bytes) state_->stop.request_stop();
  const int64_t missing = state_->missing();
  if (missing == 0) state_->prepared = wanted.bytes;
  state_->go = missing > 0 && fits(wanted);
  if (!state_->go) return;
  if (background_) {
    state_->has_thread = true;
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    state_->changed.notify_all();
    return;
  }
  while (state_->go) make_one(lock);
}

void PieceMemory::stop_preparing() {
  const std::lock_guard lock(state_->mutex);
  state_->go = false;
  state_->stop.request_stop();
}

bool PieceMemory::prepared(int64_t bytes) const {
  const std::lock_guard lock(state_->mutex);
  return bytes > 0 && state_->prepared == bytes;
}

int64_t PieceMemory::lacking(int64_t bytes) const {
  const std::lock_guard lock(state_->mutex);
  int64_t lacking = state_->missing(bytes) * bytes;
  // What is too small goes back first.
  for (const auto* buffers : {&state_->idle, &state_->discarded}) {
    for (const Tensor& one : *buffers) lacking -= one.numel() < bytes ? one.numel() : 0;
  }
  return std::max<int64_t>(lacking, 0);
}

bool PieceMemory::fits(const Wanted& wanted) {
  if (!wanted.available) return true;
  constexpr double kUsable = 0.9;
  constexpr double kGiB = 1 << 30;
  const auto needed = static_cast<double>(wanted.lacking);
  const auto available = static_cast<double>(*wanted.available);
  if (needed <= available * kUsable) return true;
  if (!std::exchange(warned_, true)) {
    spdlog::warn(
        "mirrors of the state would take {:.1f} GiB more of this host's memory, which has {:.1f} "
        "GiB left: nothing is mirrored, and a crash goes back to the checkpoint. "
        "elastic.mirror_every = 0 says so from the start; a number of steps tries it regardless",
        needed / kGiB, available / kGiB);
  }
  return false;
}

// Makes one of the buffers that are missing; called and left under the lock.
void PieceMemory::make_one(std::unique_lock<std::mutex>& lock) {
  State& state = *state_;
  state.stop = std::stop_source();
  const std::stop_token stop = state.stop.get_token();
  const int64_t bytes = state.making = state.wanted;
  Tensor buffer;
  std::string error;
  lock.unlock();
  try {
    buffer = make_(bytes, stop);
  } catch (const std::exception& e) {
    error = e.what();
  }
  lock.lock();
  state.making = 0;
  if (buffer.defined()) state.add(std::move(buffer));
  if (!error.empty() && state.wanted == bytes) {
    spdlog::error("nothing is mirrored, as there is no memory for it: {}", error);
    state.go = false;
  }
  if (state.missing() == 0) state.go = false;
}

void PieceMemory::run() {
  use_device(device_);
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  while (true) {
    state.changed.wait(lock, [&] { return state.closing || state.go || !state.discarded.empty(); });
    if (state.closing) return;
    if (!state.discarded.empty()) {  // first: there may be no room for the others before
      std::vector<Tensor> dropped = std::exchange(state.discarded, {});
      lock.unlock();
      dropped.clear();
      lock.lock();
    } else {
      make_one(lock);
    }
  }
}

}  // namespace muster
