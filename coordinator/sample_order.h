// The global order of samples: a pure function of (dataset fingerprint, seed, position). World
// size, thread timing and restarts do not enter.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace muster {

// A bijection of [0, size) under a key: a balanced Feistel network over the smallest even number of
// bits that holds size, walked until it lands inside (Black and Rogaway, "Ciphers with arbitrary
// finite domains", CT-RSA 2002). Needs no memory, unlike a shuffled list, and any position costs
// the same.
class Permutation {
 public:
  // size > 0.
  Permutation(uint64_t key, int64_t size);
  // 0 <= index < size.
  int64_t operator()(int64_t index) const;

 private:
  uint64_t encrypt(uint64_t value) const;

  uint64_t key_;
  uint64_t size_;
  int half_bits_;
};

class SampleOrder {
 public:
  // `samples` > 0: of the training split. Without shuffle every epoch is 0, 1, 2, …
  SampleOrder(uint64_t seed, const std::string& fingerprint, int64_t samples, bool shuffle);

  // The sample at a position that counts on through the epochs: epoch = position / samples.
  int64_t at(int64_t position) const;
  // Step s (from 1) is the positions [(s-1) · global_batch, s · global_batch); of these the samples
  // of one rank.
  std::vector<int64_t> step_samples(int64_t step, int64_t global_batch, int rank,
                                    int world_size) const;

 private:
  uint64_t epoch_key(int64_t epoch) const;

  uint64_t seed_;
  uint64_t fingerprint_;
  int64_t samples_;
  bool shuffle_;
};

}  // namespace muster
