// The random numbers of a simulation, from its seed.
#pragma once

#include <cstdint>
#include <random>

namespace muster::simulation {

class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}

  double uniform(double low, double high) {
    constexpr double kUnit = 0x1.0p-53;
    return low + (high - low) * static_cast<double>(engine_() >> 11) * kUnit;
  }
  bool chance(double share) { return uniform(0.0, 1.0) < share; }
  // In [low, high].
  int64_t integer(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(engine_() % static_cast<uint64_t>(high - low + 1));
  }
  // Time to the next of events that come independently, `mean` apart.
  double interval(double mean) {
    return std::exponential_distribution<double>(1.0 / mean)(engine_);
  }
  template <typename T>
  const T& pick(const std::vector<T>& from) {
    return from[static_cast<size_t>(integer(0, static_cast<int64_t>(from.size()) - 1))];
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace muster::simulation
