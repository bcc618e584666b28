#include "worker/elastic/mirror.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <utility>

#include "common/error.h"

namespace muster {
namespace {

// Bounds what is on its way at a time, and how long an abort has to wait.
constexpr int64_t kChunkBytes = 16 << 20;

int shift_of(const std::vector<std::string>& nodes) {
  std::map<std::string, int> ranks;
  int largest = 0;
  for (const std::string& node : nodes) largest = std::max(largest, ++ranks[node]);
  const int world = static_cast<int>(nodes.size());
  return largest % world == 0 ? 1 : largest;
}

}  // namespace

int mirror_holder(const std::vector<std::string>& nodes, int rank) {
  const int world = static_cast<int>(nodes.size());
  return world < 2 ? -1 : (rank + shift_of(nodes)) % world;
}

int mirror_ward(const std::vector<std::string>& nodes, int rank) {
  const int world = static_cast<int>(nodes.size());
  return world < 2 ? -1 : (rank + world - shift_of(nodes)) % world;
}

Mirror::Mirror(std::shared_ptr<GlooMesh> mesh, const MirrorOptions& options, Vault& vault,
               const Stream& compute)
    : mesh_(std::move(mesh)),
      options_(options),
      vault_(vault),
      compute_(compute),
      written_(compute.device),
      thread_([this] { run(); }) {}

Mirror::~Mirror() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    if (busy_) mesh_->abort("the mirror is closed");
  }
  changed_.notify_all();
  thread_.join();
}

void Mirror::start(int64_t step, std::vector<ShardState> state,
                   const std::optional<TrainingProgress>& progress) {
  progress_ = progress;
  const int world = mesh_->world_size();
  own_ = vault_.begin({options_.generation, world, options_.part, step});
  ward_ = vault_.begin({options_.generation, world, options_.ward_part, step});
  state_ = std::move(state);
  written_.record(compute_);
  {
    const std::lock_guard lock(mutex_);
    MUSTER_CHECK(!busy_, "a mirror begins before the last one was finished");
    busy_ = true;
    error_ = nullptr;
  }
  changed_.notify_all();
}

void Mirror::finish() {
  std::unique_lock lock(mutex_);
  // The thread's own waits have deadlines.
  changed_.wait(lock, [this] { return !busy_; });
  if (error_) std::rethrow_exception(error_);
}

void Mirror::keep(const TrainingProgress& progress) {
  if (!own_) return;
  vault_.keep(std::exchange(own_, nullptr), progress);
  vault_.keep(std::exchange(ward_, nullptr), progress);
}

void Mirror::run() {
  use_device(compute_.device);
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return busy_ || stopping_; });
    if (stopping_) return;
    lock.unlock();
    std::exception_ptr error;
    try {
      copy_to_host();
      exchange();
      if (progress_) keep(*progress_);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    error_ = error;
    busy_ = false;
    changed_.notify_all();
  }
}

void Mirror::copy_to_host() {
  auto begin = std::chrono::steady_clock::now();
  if (compute_.device.is_cuda()) {
    const OwnedStream copies(compute_.device);
    Event arrived(compute_.device);
    written_.hold(copies.stream());
    copy_state(copies.stream(), own_->state(), state_);
    arrived.record(copies.stream());
    // The step before may still compute.
    constexpr std::chrono::microseconds kBetweenLooks(200);
    const Deadline deadline = Deadline::after(std::chrono::duration<double>(options_.timeout_s));
    for (bool begun = false; !arrived.done();) {
      if (!begun) begin = std::chrono::steady_clock::now();
      begun = begun || written_.done();
      if (deadline.passed()) {
        throw TimeoutError("the GPU has not handed its state over to be mirrored in time");
      }
      std::this_thread::sleep_for(kBetweenLooks);
    }
  } else {
    copy_state(Stream::cpu(), own_->state(), state_);
  }
  copy_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void Mirror::exchange() {
  // Part 0 is the largest: all ranks make as many exchanges as it needs.
  const auto total = static_cast<int64_t>(vault_.shape().bytes(mesh_->world_size(), 0));
  const auto chunk = [](const StatePiece& piece, int64_t at) {
    const TensorView bytes = piece.bytes();
    return bytes.slice(std::min(at, bytes.numel()), std::min(at + kChunkBytes, bytes.numel()));
  };
  for (int64_t at = 0; at < total; at += kChunkBytes) {
    Exchange exchange(*mesh_, "mirror");
    const TensorView mine = chunk(*own_, at);
    const TensorView theirs = chunk(*ward_, at);
    exchange.receive(options_.ward, theirs.raw(), theirs.bytes());
    exchange.send(options_.holder, mine.raw(), mine.bytes());
    exchange.start();
    exchange.finish(Deadline::after(std::chrono::duration<double>(options_.timeout_s)));
  }
}

}  // namespace muster
