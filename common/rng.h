// Counter-based random numbers (Philox4x32-10): a value is a pure function of its key and counter,
// so world size, thread timing and restarts cannot change it. Source: Salmon et al., "Parallel
// random numbers: as easy as 1, 2, 3", SC 2011. All of it runs on GPUs too, so it is inline.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

#include "common/host_device.h"

namespace muster {

// What a random number is for; part of the key, so that two uses never share a stream.
enum class RandomPurpose : uint32_t {
  kInit = 1,
  kSampleOrder = 2,
  kDropout = 3,
  kGenerate = 4,
  kHeldOut = 5,
  kRounding = 6
};

// Four 32-bit words: a counter, or the random bits made of it.
struct PhiloxBlock {
  uint32_t word[4];
  bool operator==(const PhiloxBlock&) const = default;
};

// Ten Philox rounds for one 128-bit counter under one 64-bit key.
MUSTER_HOST_DEVICE inline PhiloxBlock philox(uint64_t key, PhiloxBlock counter) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  auto key0 = static_cast<uint32_t>(key);
  auto key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{kMultiplier0} * counter.word[0];
    const uint64_t product1 = uint64_t{kMultiplier1} * counter.word[2];
    counter = {{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0,
                static_cast<uint32_t>(product1),
                static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1,
                static_cast<uint32_t>(product0)}};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return counter;
}

// A generator keyed by (seed, purpose, stream); `stream` is a step, a sample or a parameter's hash.
class CounterRng {
 public:
  // The purpose is mixed into the key by one Philox block, so that seeds 1 and 2 share no purpose's
  // key.
  MUSTER_HOST_DEVICE CounterRng(uint64_t seed, RandomPurpose purpose, uint64_t stream)
      : key_(low_half(philox(seed, {{static_cast<uint32_t>(purpose), 0, 0, 0}}))),
        stream_(stream) {}
  // The same seed and purpose on another stream.
  MUSTER_HOST_DEVICE CounterRng with_stream(uint64_t stream) const {
    CounterRng rng = *this;
    rng.stream_ = stream;
    return rng;
  }
  // 128 random bits for index i; bits() is the first half of them.
  MUSTER_HOST_DEVICE PhiloxBlock block(uint64_t i) const {
    return philox(key_, {{static_cast<uint32_t>(i), static_cast<uint32_t>(i >> 32),
                          static_cast<uint32_t>(stream_), static_cast<uint32_t>(stream_ >> 32)}});
  }
  MUSTER_HOST_DEVICE uint64_t bits(uint64_t i) const { return low_half(block(i)); }
  // Uniform in [0, 1), 53 bits.
  MUSTER_HOST_DEVICE double uniform(uint64_t i) const { return to_unit(bits(i)); }
  // Standard normal (Box–Muller over the two halves of one block).
  MUSTER_HOST_DEVICE double normal(uint64_t i) const {
    const PhiloxBlock words = block(i);
    const double radius = std::sqrt(-2.0 * std::log1p(-to_unit(low_half(words))));
    return radius * std::cos(2.0 * std::numbers::pi * to_unit(high_half(words)));
  }

 private:
  MUSTER_HOST_DEVICE static uint64_t low_half(const PhiloxBlock& words) {
    return uint64_t{words.word[1]} << 32 | words.word[0];
  }
  MUSTER_HOST_DEVICE static uint64_t high_half(const PhiloxBlock& words) {
    return uint64_t{words.word[3]} << 32 | words.word[2];
  }
  MUSTER_HOST_DEVICE static double to_unit(uint64_t bits) {
    return static_cast<double>(bits >> 11) * 0x1.0p-53;
  }

  uint64_t key_;
  uint64_t stream_;
};

}  // namespace muster
