// The state moves from the layout of one generation to that of the next, from memory to memory. A
// pure plan of ranges says who sends what to whom; it is carried out in windows, so that the extra
// memory is bounded whatever the size of the model.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/protocol/muster.pb.h"
#include "worker/comm/gloo_mesh.h"
#include "worker/elastic/vault.h"
#include "worker/model/context.h"

namespace muster {

struct HandoverPlan {
  uint64_t generation = 0;  // whose pieces these are
  int64_t step = 0;         // after which
  int self = 0;             // this process among the participants
  int participants = 1;
  std::vector<int> holders;  // participant by part of the old layout
  std::vector<int> owners;   // participant by part of the new one

  int old_world() const { return static_cast<int>(holders.size()); }
  int new_world() const { return static_cast<int>(owners.size()); }
};

// `shard_group`: of the new generation. Throws PeerError when the assignment does not fit together,
// or this member is not in it.
HandoverPlan plan_handover(const proto::Assignment& assignment, int shard_group,
                           const std::string& member_id);

struct HandoverOptions {
  // Elements of a unit that are under way at a time; all ranks have the same. What is sent and what
  // is received takes at most so many elements' room each.
  int64_t window = 4 << 20;
  double timeout_s = 60.0;  // for each window
};

// What connects the participants.
struct HandoverLinks {
  std::shared_ptr<GlooMesh> mesh;  // null: there is only one
  // On GPUs: from device to device; null: by way of host memory, over the mesh.
  std::shared_ptr<Communicator> gpus;
};

// Moves what this process holds (in `vault`) to its owners, and its own part of the new layout to
// `target`, as of ShardedParameters::state() (empty for one that has no part in it), on the
// context's stream; when it returns, all that is enqueued there has happened, and all participants
// have what is theirs. Returns where training stands. Throws PeerError when the vault has no such
// piece or a participant is gone, TimeoutError.
TrainingProgress hand_over(const HandoverLinks& links, const HandoverPlan& plan, const Vault& vault,
                           const std::vector<ShardState>& target, const ComputeContext& context,
                           const HandoverOptions& options = {});

}  // namespace muster
