// Hybrid sharding: the world cut into shard groups of consecutive ranks, typically the workers of a
// node, each of which holds everything once; and across them replica groups, of the ranks that hold
// the same. What is large and frequent (weights, gradients of every pass) then stays inside a node.
#pragma once

#include <memory>
#include <string>

#include "worker/comm/communicator.h"

namespace muster {

// Who talks to whom. Refers to communicators that others own.
struct Groups {
  // One shard group of all ranks. Implicit: what knows no groups passes its communicator.
  Groups(Communicator& all) : world(all), shard(all) {}
  Groups(Communicator& all, Communicator& mine, Communicator& same)
      : world(all), shard(mine), replicas(&same) {}

  Communicator& world;
  Communicator& shard;               // rank r % G of G
  Communicator* replicas = nullptr;  // rank r / G of W / G; none where that is 1
};

// The communicators of one rank, which live and fail together. It is itself the world's; abort()
// ends all of them, check_alive() throws what ended any, wait_seconds() counts all.
class GroupedCommunicator : public Communicator {
 public:
  // `options` describe the world, of which `shard_group` is a divisor; a group of one rank, or of
  // all of them, needs no communicators beside the world's. Collective; throws as
  // make_communicator().
  GroupedCommunicator(const CommunicatorOptions& options, int shard_group, Store& store);

  Groups groups();

  int rank() const override { return world_->rank(); }
  int world_size() const override { return world_->world_size(); }
  std::unique_ptr<Work> all_gather(TensorView full, ConstTensorView shard) override;
  std::unique_ptr<Work> reduce_scatter(TensorView shard, TensorView full) override;
  std::unique_ptr<Work> all_reduce(TensorView values) override;
  std::unique_ptr<Work> exchange(std::vector<Parcel> outgoing,
                                 std::vector<Parcel> incoming) override;
  void barrier() override { world_->barrier(); }
  void abort(const std::string& reason) noexcept override;
  void check_alive() const override;
  double wait_seconds() const override;

 private:
  std::unique_ptr<Communicator> world_;
  std::unique_ptr<Communicator> shard_;     // null: the world, or this rank alone
  std::unique_ptr<Communicator> replicas_;  // together with shard_
};

}  // namespace muster
