#include "worker/model/parameters.h"

#include "common/hash.h"
#include "common/rng.h"

namespace muster {

int64_t UnitSpec::numel() const {
  return offset(parameters.size());
}

int64_t UnitSpec::offset(size_t i) const {
  MUSTER_CHECK(i <= parameters.size());
  int64_t elements = 0;
  for (size_t before = 0; before < i; ++before) elements += parameters[before].shape.numel();
  return elements;
}

float initial_value(uint64_t seed, const ParameterSpec& spec, int64_t i) {
  switch (spec.init) {
    case Init::kZeros:
      return 0.0f;
    case Init::kOnes:
      return 1.0f;
    case Init::kNormal: {
      const CounterRng rng(seed, RandomPurpose::kInit, xxh3(spec.name.data(), spec.name.size()));
      return static_cast<float>(spec.init_std * rng.normal(static_cast<uint64_t>(i)));
    }
  }
  MUSTER_CHECK(false, "bad init");
}

}  // namespace muster
