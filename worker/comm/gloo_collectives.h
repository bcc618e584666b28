// Collectives as exchanges over a mesh; each returns when it is complete. Every rank sends to
// every other directly, which moves as few bytes as a ring and needs no more steps than one.
// Sums are taken in rank order by one rank each, so results do not depend on timing.
#pragma once

#include <vector>

#include "common/deadline.h"
#include "common/tensor.h"
#include "worker/comm/gloo_mesh.h"

namespace muster {

// full[r · n, (r + 1) · n) = shard of rank r. `shard` may be this rank's part of `full`.
void all_gather(GlooMesh& mesh, TensorView full, ConstTensorView shard, Deadline deadline);
// shard = Σ over ranks of full[rank · n, (rank + 1) · n). Reads `full`, needs bounded scratch.
void reduce_scatter(GlooMesh& mesh, TensorView shard, TensorView full, Deadline deadline);
void all_reduce(GlooMesh& mesh, TensorView values, Deadline deadline);
// As Communicator::exchange.
void exchange(GlooMesh& mesh, const std::vector<Parcel>& outgoing,
              const std::vector<Parcel>& incoming, Deadline deadline);
void barrier(GlooMesh& mesh, Deadline deadline);

}  // namespace muster
