#include "worker/model/parameters.h"

#include "common/hash.h"
#include "kernels/init/init.h"

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

void fill_initial(const Stream& stream, TensorView out, uint64_t seed, const ParameterSpec& spec,
                  int64_t first) {
  switch (spec.init) {
    case Init::kZeros:
      return fill_value(stream, out, 0.0f);
    case Init::kOnes:
      return fill_value(stream, out, 1.0f);
    case Init::kNormal:
      return fill_normal(stream, out, seed, xxh3(spec.name.data(), spec.name.size()), first,
                         spec.init_std);
  }
  MUSTER_CHECK(false, "bad init");
}

}  // namespace muster
