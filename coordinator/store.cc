#include "coordinator/store.h"

#include <algorithm>

namespace muster {

std::vector<std::string> RendezvousStore::set(const std::string& key, const std::string& value) {
  if (prefix_.empty() || !key.starts_with(prefix_)) return {};
  values_[key] = value;
  auto node = waiting_.extract(key);
  return node.empty() ? std::vector<std::string>{} : std::move(node.mapped());
}

std::optional<std::string> RendezvousStore::get(const std::string& key, const std::string& peer) {
  const auto found = values_.find(key);
  if (found != values_.end()) return found->second;
  if (!prefix_.empty() && key.starts_with(prefix_)) {
    auto& peers = waiting_[key];
    if (std::find(peers.begin(), peers.end(), peer) == peers.end()) peers.push_back(peer);
  }
  return std::nullopt;
}

void RendezvousStore::begin_generation(uint64_t generation) {
  prefix_ = std::to_string(generation) + "/";
  values_.clear();
  waiting_.clear();
}

}  // namespace muster
