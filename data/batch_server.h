// The workers' side of the data service: rings, requests, replies.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/transport/transport.h"
#include "data/dataset.h"
#include "data/thread_pool.h"

namespace muster {

// Belongs to one thread. A worker's prefetch is bounded by its ring: each
// request names a free slot, and a slot in use is refused. The ring of a worker that has died is
// freed within a second; one that opens another ring gives up its first.
class BatchServer {
 public:
  // Binds an abstract socket of a random name. `dataset` must outlive this.
  BatchServer(Dataset& dataset, const Security& security, int threads);
  ~BatchServer();

  const std::string& endpoint() const { return server_.endpoint(); }
  // Serves until a stop is requested. `rings_changed` hears the number of open rings whenever it
  // changes.
  void run(const std::stop_token& stop, std::function<void(int)> rings_changed = {});

 private:
  struct Ring;
  struct Done;  // a request that the pool has finished
  // By the worker's routing id.
  using Rings = std::unordered_map<std::string, std::shared_ptr<Ring>>;

  void handle(const Received& received);
  void open_ring(const Received& received);
  void request(const Received& received);
  void reply_done();
  void drop_dead();
  // Erases the rings for which `drop(ring)`; tasks that still write into them keep the memory
  // alive.
  template <typename Drop>
  void drop_rings(const char* why, Drop drop);

  Dataset& dataset_;
  Server server_;
  Waker waker_;
  Rings rings_;
  std::function<void(int)> rings_changed_;
  std::mutex mutex_;  // guards done_
  std::vector<Done> done_;
  ThreadPool pool_;  // last: its tasks use what is above
};

}  // namespace muster
