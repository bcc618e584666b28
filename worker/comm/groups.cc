#include "worker/comm/groups.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace muster {
namespace {

// The communicator of some of the world's ranks.
std::unique_ptr<Communicator> make_group(CommunicatorOptions options, std::vector<int> ranks,
                                         const std::string& name, Store& store) {
  const auto own = std::find(ranks.begin(), ranks.end(), options.rank);
  options.rank = static_cast<int>(own - ranks.begin());
  options.world_size = static_cast<int>(ranks.size());
  options.store_prefix += name + "/";
  options.names = std::move(ranks);
  return make_communicator(options, store);
}

}  // namespace

GroupedCommunicator::GroupedCommunicator(const CommunicatorOptions& options, int shard_group,
                                         Store& store)
    : world_(make_communicator(options, store)) {
  MUSTER_CHECK(shard_group > 0 && options.world_size % shard_group == 0);
  if (shard_group == 1 || shard_group == options.world_size) return;
  const int group = options.rank / shard_group;
  const int member = options.rank % shard_group;
  std::vector<int> mine;
  std::vector<int> same;
  mine.reserve(shard_group);
  for (int i = 0; i < shard_group; ++i) mine.push_back(group * shard_group + i);
  for (int rank = member; rank < options.world_size; rank += shard_group) same.push_back(rank);
  shard_ = make_group(options, mine, "shard-" + std::to_string(group), store);
  replicas_ = make_group(options, same, "replicas-" + std::to_string(member), store);
}

Groups GroupedCommunicator::groups() {
  return shard_ ? Groups(*this, *shard_, *replicas_) : Groups(*this);
}

std::unique_ptr<Work> GroupedCommunicator::all_gather(TensorView full, ConstTensorView shard) {
  return world_->all_gather(full, shard);
}

std::unique_ptr<Work> GroupedCommunicator::reduce_scatter(TensorView shard, TensorView full) {
  return world_->reduce_scatter(shard, full);
}

std::unique_ptr<Work> GroupedCommunicator::all_reduce(TensorView values) {
  return world_->all_reduce(values);
}

std::unique_ptr<Work> GroupedCommunicator::exchange(std::vector<Parcel> outgoing,
                                                    std::vector<Parcel> incoming) {
  return world_->exchange(std::move(outgoing), std::move(incoming));
}

void GroupedCommunicator::abort(const std::string& reason) noexcept {
  for (Communicator* one : {world_.get(), shard_.get(), replicas_.get()}) {
    if (one != nullptr) one->abort(reason);
  }
}

void GroupedCommunicator::check_alive() const {
  for (const Communicator* one : {world_.get(), shard_.get(), replicas_.get()}) {
    if (one != nullptr) one->check_alive();
  }
}

double GroupedCommunicator::wait_seconds() const {
  double seconds = 0.0;
  for (const Communicator* one : {world_.get(), shard_.get(), replicas_.get()}) {
    if (one != nullptr) seconds += one->wait_seconds();
  }
  return seconds;
}

}  // namespace muster
