// Connections of every rank to every other over Gloo's TCP transport, and the one primitive that
// the collectives are made of: an exchange of messages with an end that is always reached.
// Gloo's own collectives are not used: they cannot be aborted and do not say which rank is gone.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "common/deadline.h"
#include "worker/comm/communicator.h"
#include "worker/comm/interrupt.h"
#include "worker/comm/peer_watch.h"

namespace gloo::transport {
class Context;
class UnboundBuffer;
namespace tcp {
class Device;
}  // namespace tcp
}  // namespace gloo::transport

namespace muster {

class LoopQueue;

// The address of this host that peers can reach: of `interface_name`, else the one that the kernel
// would use towards `route_to`, else loopback. Throws ConfigError naming the interfaces there are.
std::string local_address(const std::string& interface_name, const std::string& route_to);
// The network interface that has this address, "eth0"; "" when none has.
std::string interface_of(const std::string& address);

class GlooMesh {
 public:
  // Meets the others through `store` and connects. Throws TimeoutError or PeerError naming the rank
  // that was waited for, or PeerError with the reason of the options' interrupt.
  GlooMesh(const CommunicatorOptions& options, Store& store);
  // No exchange may be alive. A mesh that was not aborted takes leave of its peers, so that those
  // still busy with each other are not disturbed.
  ~GlooMesh();
  GlooMesh(const GlooMesh&) = delete;
  GlooMesh& operator=(const GlooMesh&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  // Ends every exchange under way with PeerError(reason), closes all connections. The first reason
  // stays. Happens by itself when a connection breaks. Thread-safe.
  void abort(const std::string& reason) noexcept;
  // Throws PeerError with the reason of abort(), if there was one.
  void check_alive() const;
  // "rank 1", "ranks 1, 2" or "", as the options' names have it.
  std::string name(const std::set<int>& peers) const;
  // Ranks that have closed their mesh without an abort: "rank 1", "ranks 1, 2" or "".
  std::string departed() const;

 private:
  friend class Exchange;
  void meet(const CommunicatorOptions& options, Store& store);
  void connect(const CommunicatorOptions& options, Store& store, Deadline deadline);

  const int rank_;
  const int world_size_;
  const std::vector<int> names_;
  std::chrono::duration<double> timeout_;
  std::shared_ptr<gloo::transport::tcp::Device> device_;
  std::shared_ptr<gloo::transport::Context> context_;
  // Messages so far, by peer: what tells them apart on a connection, and the same at both of its
  // ends.
  struct Traffic {
    uint64_t sent = 0;
    uint64_t received = 0;
  };
  std::vector<Traffic> traffic_;

  mutable std::mutex mutex_;
  bool aborted_ = false;
  std::string reason_;
  std::unordered_set<gloo::transport::UnboundBuffer*> buffers_;  // of exchanges under way
  std::unique_ptr<LoopQueue> loop_;
  std::unique_ptr<PeerWatch> watch_;  // its thread uses everything above
  Interrupt::Handle interrupted_;     // likewise
};

// Messages to and from peers that travel at the same time; at most one each way a peer. Any two
// ranks add the messages between them in the same order; others need not take part. Memory belongs
// to the exchange until finish() or the destructor.
class Exchange {
 public:
  // `what` names the operation in errors: "all_gather".
  Exchange(GlooMesh& mesh, const char* what);
  // Ends what is still under way by aborting the mesh.
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Empty messages are left out; both sides must agree on the size.
  void receive(int peer, void* data, size_t bytes);
  void send(int peer, const void* data, size_t bytes);
  // Puts all of the above on their way. Once.
  void start();
  // Returns when all has arrived and all memory that was sent may be reused. On failure the mesh
  // is aborted and PeerError or TimeoutError names the ranks.
  void finish(Deadline deadline);

 private:
  struct Message {
    int peer;
    bool outgoing;
    uint64_t slot;
    std::unique_ptr<gloo::transport::UnboundBuffer> buffer;
  };
  // A message that Gloo refused to take, and why.
  struct Refusal {
    int message = -1;
    std::string detail;
  };
  void add(int peer, bool outgoing, void* data, size_t bytes);
  Refusal post_all();
  [[noreturn]] void fail(size_t failed, bool late, const std::string& detail);
  void forget_buffers() noexcept;

  GlooMesh& mesh_;
  const char* what_;
  std::vector<Message> messages_;
  std::future<Refusal> posted_;
};

}  // namespace muster
