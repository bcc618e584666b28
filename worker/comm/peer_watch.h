// Notices at once when the connection to any peer breaks, also while this rank waits for another
// one or computes. Without it a rank hears of a death only when it next needs that peer.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace gloo::transport {
class Context;
class UnboundBuffer;
}  // namespace gloo::transport

namespace muster {

class PeerWatch {
 public:
  // Calls on_loss(ranks, why) from its own thread, once, when the connection to a peer breaks
  // before that peer has said goodbye; with all that are lost by then, and why one of them.
  // `context` is connected to all peers. Throws PeerError naming one that is gone already.
  PeerWatch(std::shared_ptr<gloo::transport::Context> context,
            std::function<void(const std::set<int>&, const std::string&)> on_loss);
  ~PeerWatch();
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  // Tells all peers that this rank closes its connections with nothing left undone.
  void say_goodbye() noexcept;
  // Peers that have closed the connection after their goodbye: nothing more will come of them.
  std::vector<int> departed() const;
  // Peers whose connection has broken before their goodbye. Who leaves because of another's death
  // may be noticed before the dead one is, so whoever names one should name them all.
  std::set<int> lost() const;

 private:
  void watch();

  std::shared_ptr<gloo::transport::Context> context_;
  std::function<void(const std::set<int>&, const std::string&)> on_loss_;
  std::vector<char> goodbyes_;  // [W], where the peers' goodbyes arrive
  using Buffers = std::vector<std::unique_ptr<gloo::transport::UnboundBuffer>>;
  Buffers arrivals_;  // [W], null for this rank
  Buffers ends_;      // [W], what never comes; null for this rank and those that have left

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int> departed_;
  bool stopping_ = false;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace muster
