#include "worker/comm/interrupt.h"

#include "common/error.h"
#include "common/logging.h"

namespace muster {

Interrupt::Handle& Interrupt::Handle::operator=(Handle&& other) noexcept {
  if (this != &other) {
    release();
    owner_ = std::move(other.owner_);
    id_ = other.id_;
  }
  return *this;
}

void Interrupt::Handle::release() noexcept {
  if (!owner_) return;
  Callback callback;  // what it holds may go only once the lock is free
  {
    const std::lock_guard lock(owner_->mutex_);
    const auto found = owner_->callbacks_.find(id_);
    if (found != owner_->callbacks_.end()) {
      callback = std::move(found->second);
      owner_->callbacks_.erase(found);
    }
  }
  owner_.reset();
}

void Interrupt::fire(const std::string& reason) noexcept {
  const std::lock_guard lock(mutex_);
  if (reason_) return;
  reason_ = reason;
  for (const auto& [id, callback] : callbacks_) {
    try {
      callback(reason);
    } catch (const std::exception& error) {
      spdlog::error("interrupting a generation: {}", error.what());
    }
  }
}

void Interrupt::check() const {
  const std::lock_guard lock(mutex_);
  if (reason_) throw PeerError(*reason_);
}

Interrupt::Handle Interrupt::on_fire(Callback callback) {
  const std::lock_guard lock(mutex_);
  if (reason_) {
    callback(*reason_);
    return {};
  }
  callbacks_[next_] = std::move(callback);
  return {shared_from_this(), next_++};
}

}  // namespace muster
