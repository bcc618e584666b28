#include "common/rng.h"
#include "kernels/blocks.h"
#include "kernels/init/init.h"

namespace muster::cpu {

void fill_normal(const Stream&, TensorView out, uint64_t seed, uint64_t stream_key, int64_t first,
                 double std) {
  const CounterRng rng(seed, RandomPurpose::kInit, stream_key);
  float* to = out.data<float>();
  for_blocks(out.numel(), [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      to[i] = static_cast<float>(std * rng.normal(static_cast<uint64_t>(first + i)));
    }
  });
}

void fill_value(const Stream&, TensorView out, float value) {
  float* to = out.data<float>();
  for_blocks(out.numel(),
             [=](int64_t begin, int64_t end) { std::fill(to + begin, to + end, value); });
}

}  // namespace muster::cpu
