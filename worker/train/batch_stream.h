// The micro-batches of the planned steps, in the order in which they are needed, requested from the
// data service as far ahead as its ring allows.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "common/deadline.h"
#include "data/batch.h"
#include "data/client.h"

namespace muster {

class BatchStream {
 public:
  explicit BatchStream(DataClient& client) : client_(client) {}

  // These come next, after all planned before. An empty one stands for a pass without samples.
  void plan(Split split, std::vector<std::vector<int64_t>> batches);
  // The next planned micro-batch: of the data service, or for a pass without samples `empty`. Valid
  // until release().
  const Batch& next(const Batch& empty, Deadline deadline);
  void release(const Batch& batch);

 private:
  void request_ahead();

  DataClient& client_;
  std::deque<bool> has_samples_;  // of each planned batch that next() has not returned
  std::deque<std::pair<Split, std::vector<int64_t>>> wanted_;  // not requested yet
};

// A batch of one sample whose targets are all ignored: its loss and gradients are exactly zero.
// What a rank runs when others have a micro-batch more, so that all make the same collectives.
class EmptyBatch {
 public:
  explicit EmptyBatch(int64_t sequence_length);
  const Batch& batch() const { return batch_; }

 private:
  Tensor tokens_, targets_, positions_, cu_seqlens_;
  Batch batch_;
};

}  // namespace muster
