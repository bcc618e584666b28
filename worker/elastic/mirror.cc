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

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
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
  finish(Until::kSent);
  const int world = mesh_->world_size();
  auto own = vault_.begin({options_.generation, world, options_.part, step});
  auto ward = vault_.begin({options_.generation, world, options_.ward_part, step});
  state_ = std::move(state);
  written_.record(compute_);
  {
    const std::lock_guard lock(mutex_);
    own_ = std::move(own);
    ward_ = std::move(ward);
    progress_ = progress;
    copied_ = sent_ = false;
    busy_ = true;
  }
  changed_.notify_all();
}

void Mirror::finish(Until until) {
  std::unique_lock lock(mutex_);
  // The thread's own waits have deadlines.
  changed_.wait(lock, [&] { return !busy_ || (until == Until::kCopied && copied_); });
  if (error_) std::rethrow_exception(error_);
}

void Mirror::check() {
  const std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
}

void Mirror::keep(const TrainingProgress& progress) {
  const std::lock_guard lock(mutex_);
  progress_ = progress;
  put();
}

// What is complete and not yet there; the mutex is held.
void Mirror::put() {
  if (!progress_) return;
  if (copied_ && own_) vault_.keep(std::exchange(own_, nullptr), *progress_);
  if (sent_ && ward_) {
    mirrored_ = ward_->id().step;
    vault_.keep(std::exchange(ward_, nullptr), *progress_);
  }
}

std::optional<int64_t> Mirror::mirrored() const {
  const std::lock_guard lock(mutex_);
  return mirrored_;
}

double Mirror::copy_seconds() const {
  const std::lock_guard lock(mutex_);
  return copy_seconds_;
}

double Mirror::sent_seconds() const {
  const std::lock_guard lock(mutex_);
  return sent_seconds_;
}

void Mirror::run() {
  use_device(compute_.device);
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return busy_ || stopping_; });
    if (stopping_) return;
    auto own = own_;
    auto ward = ward_;
    lock.unlock();
    std::exception_ptr error;
    try {
      copy_to_host(*own);
      const auto begin = std::chrono::steady_clock::now();
      exchange(*own, *ward);
      reach(Until::kSent, seconds_since(begin));
    } catch (...) {
      error = std::current_exception();
    }
    own.reset();
    ward.reset();
    lock.lock();
    error_ = error;
    busy_ = false;
    changed_.notify_all();
  }
}

void Mirror::reach(Until done, double seconds) {
  const std::lock_guard lock(mutex_);
  (done == Until::kCopied ? copied_ : sent_) = true;
  (done == Until::kCopied ? copy_seconds_ : sent_seconds_) = seconds;
  put();
  changed_.notify_all();
}

void Mirror::copy_to_host(const StatePiece& own) {
  auto begin = std::chrono::steady_clock::now();
  if (compute_.device.is_cuda()) {
    const OwnedStream copies(compute_.device);
    Event arrived(compute_.device);
    written_.hold(copies.stream());
    copy_state(copies.stream(), own.state(), state_);
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
    copy_state(Stream::cpu(), own.state(), state_);
  }
  reach(Until::kCopied, seconds_since(begin));
}

void Mirror::exchange(const StatePiece& own, const StatePiece& ward) {
  // Part 0 is the largest: all ranks make as many exchanges as it needs.
  const auto total = static_cast<int64_t>(vault_.shape().bytes(mesh_->world_size(), 0));
  const auto chunk = [](const StatePiece& piece, int64_t at) {
    const TensorView bytes = piece.bytes();
    return bytes.slice(std::min(at, bytes.numel()), std::min(at + kChunkBytes, bytes.numel()));
  };
  for (int64_t at = 0; at < total; at += kChunkBytes) {
    Exchange exchange(*mesh_, "mirror");
    const TensorView mine = chunk(own, at);
    const TensorView theirs = chunk(ward, at);
    exchange.receive(options_.ward, theirs.raw(), theirs.bytes());
    exchange.send(options_.holder, mine.raw(), mine.bytes());
    exchange.start();
    exchange.finish(Deadline::after(std::chrono::duration<double>(options_.timeout_s)));
  }
}

}  // namespace muster
