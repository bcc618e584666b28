// Ends, from another thread, whatever somebody has begun and may wait in: a rendezvous,
// collectives, an exchange. One for each generation: all that belongs to it ends together.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace muster {

class Interrupt : public std::enable_shared_from_this<Interrupt> {
 public:
  using Callback = std::function<void(const std::string& reason)>;
  // Takes the callback back at its end: it does not run any more by then.
  class Handle {
   public:
    Handle() = default;
    Handle(std::shared_ptr<Interrupt> owner, int id) : owner_(std::move(owner)), id_(id) {}
    Handle(Handle&& other) noexcept : owner_(std::move(other.owner_)), id_(other.id_) {}
    Handle& operator=(Handle&& other) noexcept;
    ~Handle() { release(); }
    void release() noexcept;

   private:
    std::shared_ptr<Interrupt> owner_;
    int id_ = 0;
  };

  static std::shared_ptr<Interrupt> make() { return std::shared_ptr<Interrupt>(new Interrupt()); }

  // Runs all callbacks. The first reason stays. Callbacks must not block for long, nor take or give
  // back handles.
  void fire(const std::string& reason) noexcept;
  // Throws PeerError with the reason, if it was fired.
  void check() const;
  // Runs once when it is fired; now, if it was.
  [[nodiscard]] Handle on_fire(Callback callback);

 private:
  Interrupt() = default;
  mutable std::mutex mutex_;  // held while callbacks run
  std::optional<std::string> reason_;
  std::map<int, Callback> callbacks_;
  int next_ = 0;
};

}  // namespace muster
