#include "common/rng.h"

#include <cmath>
#include <numbers>

namespace muster {

std::array<uint32_t, 4> philox(uint64_t key, std::array<uint32_t, 4> counter) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  auto key0 = static_cast<uint32_t>(key);
  auto key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{kMultiplier0} * counter[0];
    const uint64_t product1 = uint64_t{kMultiplier1} * counter[2];
    counter = {
        static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key0, static_cast<uint32_t>(product1),
        static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key1, static_cast<uint32_t>(product0)};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return counter;
}

namespace {

std::array<uint32_t, 4> block(uint64_t key, uint64_t stream, uint64_t i) {
  return philox(key, {static_cast<uint32_t>(i), static_cast<uint32_t>(i >> 32),
                      static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)});
}

uint64_t join(uint32_t low, uint32_t high) {
  return uint64_t{high} << 32 | low;
}

double to_unit(uint64_t bits) {
  return static_cast<double>(bits >> 11) * 0x1.0p-53;
}

}  // namespace

CounterRng::CounterRng(uint64_t seed, RandomPurpose purpose, uint64_t stream) : stream_(stream) {
  // The purpose is mixed into the key by one Philox block, so that seeds 1 and 2 share no purpose's
  // key.
  const auto mixed = philox(seed, {static_cast<uint32_t>(purpose), 0, 0, 0});
  key_ = join(mixed[0], mixed[1]);
}

uint64_t CounterRng::bits(uint64_t i) const {
  const auto words = block(key_, stream_, i);
  return join(words[0], words[1]);
}

double CounterRng::uniform(uint64_t i) const {
  return to_unit(bits(i));
}

double CounterRng::normal(uint64_t i) const {
  const auto words = block(key_, stream_, i);
  const double radius = std::sqrt(-2.0 * std::log1p(-to_unit(join(words[0], words[1]))));
  return radius * std::cos(2.0 * std::numbers::pi * to_unit(join(words[2], words[3])));
}

}  // namespace muster
