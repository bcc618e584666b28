// Counter-based random numbers (Philox4x32-10): a value is a pure function of its key and counter,
// so world size, thread timing and restarts cannot change it. Source: Salmon et al., "Parallel
// random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include <array>
#include <cstdint>

namespace muster {

// What a random number is for; part of the key, so that two uses never share a stream.
enum class RandomPurpose : uint32_t {
  kInit = 1,
  kSampleOrder = 2,
  kDropout = 3,
  kGenerate = 4,
  kHeldOut = 5
};

// Ten Philox rounds: four 32-bit words for one 128-bit counter under one 64-bit key.
std::array<uint32_t, 4> philox(uint64_t key, std::array<uint32_t, 4> counter);

// A generator keyed by (seed, purpose, stream); `stream` is a step, a sample or a parameter's hash.
class CounterRng {
 public:
  CounterRng(uint64_t seed, RandomPurpose purpose, uint64_t stream);
  // 64 random bits for index i.
  uint64_t bits(uint64_t i) const;
  // Uniform in [0, 1), 53 bits.
  double uniform(uint64_t i) const;
  // Standard normal (Box–Muller over the two halves of one block).
  double normal(uint64_t i) const;

 private:
  uint64_t key_;
  uint64_t stream_;
};

}  // namespace muster
