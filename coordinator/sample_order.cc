#include "coordinator/sample_order.h"

#include <bit>

#include "common/check.h"
#include "common/hash.h"
#include "common/rng.h"
#include "common/slice.h"

namespace muster {

namespace {
// Four make a Feistel network a pseudorandom permutation (Luby and Rackoff); small domains want
// some more.
constexpr uint64_t kRounds = 8;
}  // namespace

Permutation::Permutation(uint64_t key, int64_t size)
    : key_(key), size_(static_cast<uint64_t>(size)) {
  MUSTER_CHECK(size > 0);
  half_bits_ = (std::bit_width(size_ - 1) + 1) / 2;
}

uint64_t Permutation::encrypt(uint64_t value) const {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t left = value >> half_bits_;
  uint64_t right = value & mask;
  for (uint64_t round = 0; round < kRounds; ++round) {
    const uint64_t mixed = CounterRng(key_, RandomPurpose::kSampleOrder, round).bits(right) & mask;
    const uint64_t next = left ^ mixed;
    left = right;
    right = next;
  }
  return left << half_bits_ | right;
}

int64_t Permutation::operator()(int64_t index) const {
  MUSTER_CHECK(index >= 0 && static_cast<uint64_t>(index) < size_);
  // The network's domain is below four times size, so a walk takes under four tries on average; it
  // ends because a bijection's cycle leads back to `index` itself.
  uint64_t value = static_cast<uint64_t>(index);
  do {
    value = encrypt(value);
  } while (value >= size_);
  return static_cast<int64_t>(value);
}

SampleOrder::SampleOrder(uint64_t seed, const std::string& fingerprint, int64_t samples,
                         bool shuffle)
    : seed_(seed),
      fingerprint_(xxh3(fingerprint.data(), fingerprint.size())),
      samples_(samples),
      shuffle_(shuffle) {
  MUSTER_CHECK(samples > 0);
}

uint64_t SampleOrder::epoch_key(int64_t epoch) const {
  return CounterRng(seed_, RandomPurpose::kSampleOrder, fingerprint_)
      .bits(static_cast<uint64_t>(epoch));
}

int64_t SampleOrder::at(int64_t position) const {
  MUSTER_CHECK(position >= 0);
  const int64_t index = position % samples_;
  if (!shuffle_) return index;
  return Permutation(epoch_key(position / samples_), samples_)(index);
}

std::vector<int64_t> SampleOrder::step_samples(int64_t step, int64_t global_batch, int rank,
                                               int world_size) const {
  MUSTER_CHECK(step > 0 && rank >= 0 && rank < world_size);
  const Slice slice = slice_of(global_batch, rank, world_size);
  const int64_t first = (step - 1) * global_batch;
  std::vector<int64_t> samples;
  samples.reserve(static_cast<size_t>(slice.size()));
  for (int64_t i = slice.begin; i < slice.end; ++i) samples.push_back(at(first + i));
  return samples;
}

}  // namespace muster
