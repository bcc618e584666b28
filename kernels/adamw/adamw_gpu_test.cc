#include "kernels/adamw/adamw.h"
#include "kernels/cuda/gpu_testing.h"
#include "kernels/step_control/step_control.h"

namespace muster {
namespace {

using namespace testing;
using AdamwGpuTest = GpuTest;
using Segments = std::vector<AdamwSegment>;

constexpr StepControl kControl{.updates = 7,
                               .apply = 1,
                               .grad_scale = 0.125f,
                               .step_size = 0.02f,
                               .inverse_root_correction = 1.8f};
const AdamwOptions kOptions{.lr = 1e-2, .rounding_seed = 3};

// A StepControl on both sides.
class Control {
 public:
  explicit Control(const StepControl& control)
      : host_({sizeof(StepControl)}, DType::kUInt8),
        device_({sizeof(StepControl)}, DType::kUInt8, gpu_memory()) {
    std::memcpy(host_.view().raw(), &control, sizeof(control));
    CUDA_CHECK(cudaMemcpy(device_.view().raw(), &control, sizeof(control), cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaDeviceSynchronize());
  }
  ConstTensorView on(const Stream& stream) const {
    return stream.device.is_cpu() ? host_ : device_;
  }

 private:
  Tensor host_;
  Tensor device_;
};

// The operands of an update on the GPU.
struct State {
  Operand weight, m, v, low, grad;

  State(int64_t n, DType moments, Layout layout = {.row_stride = 1})
      : weight(Operand::random({n}, DType::kFloat32, 1, 1.0, 0.0, layout)),
        m(Operand::random({n}, moments, 2, 0.1, 0.0, layout)),
        v(Operand::random({n}, moments, 3, 0.01, 0.1, layout)),
        low({n}, DType::kBFloat16, layout),
        grad(Operand::random({n}, DType::kFloat32, 4, 2.0, 0.0, layout)) {}

  void upload() const {
    for (const Operand* o : {&weight, &m, &v, &low, &grad}) o->upload();
  }
  // Elements [begin, end) of the shard.
  void step(const StepControl& control, int64_t begin, int64_t end, const Segments& segments,
            const AdamwOptions& options = kOptions) const {
    const Control on_device(control);
    const auto part = [&](const Operand& o) { return o.device().slice(begin, end); };
    adamw_step(gpu_stream(), part(weight), part(m), part(v), part(low), part(grad),
               on_device.on(gpu_stream()), segments, options);
    CUDA_CHECK(cudaStreamSynchronize(static_cast<cudaStream_t>(gpu_stream().handle)));
  }
};

void expect_equal(const Operand& a, const Operand& b) {
  const auto x = a.download();
  const auto y = b.download();
  ASSERT_EQ(std::memcmp(x.data(), y.data(), x.size() * sizeof(double)), 0);
}

void check(int64_t n, int64_t offset, const Segments& segments) {
  State state(n, DType::kFloat32, {.offset = offset, .row_stride = 1});
  const Control control(kControl);
  expect_matches_cpu({&state.grad}, {&state.weight, &state.m, &state.v},
                     [&](const Stream& stream, const At& at) {
                       adamw_step(stream, at(state.weight), at(state.m), at(state.v), {},
                                  at(state.grad), control.on(stream), segments, kOptions);
                     });
  // The rounded copy: of every element of a segment, and of no other.
  state.upload();
  state.step(kControl, 0, n, segments);
  const auto weight = state.weight.download();
  const auto low = state.low.download();
  for (size_t i = 0; i < low.size(); ++i) {
    const int64_t element = static_cast<int64_t>(i) - offset;
    const bool inside = std::any_of(segments.begin(), segments.end(), [&](const auto& s) {
      return element >= s.begin && element < s.end;
    });
    if (inside) {
      ASSERT_EQ(low[i], from_bf16_bits(bf16_bits(static_cast<float>(weight[i])))) << element;
    } else {
      ASSERT_TRUE(std::isnan(low[i])) << element;
    }
  }
}

TEST_F(AdamwGpuTest, MatchesTheCpuOnOddSegmentsWithGaps) {
  for (const int64_t offset : {0, 8, 1}) {
    check(10007, offset,
          {{3, 5, 0.1f},
           {5, 1027, 0.0f},
           {1027, 1028, 0.1f},
           {2050, 9001, 0.1f},
           {9001, 10007, 0.0f}});
  }
  check(1, 0, {{0, 1, 0.1f}});
  check(100, 0, {});
}

TEST_F(AdamwGpuTest, TakesMoreSegmentsThanOneLaunchHolds) {
  Segments segments;
  for (int64_t i = 0; i < 2500; ++i) {
    segments.push_back({i * 7, i * 7 + 6, i % 2 == 0 ? 0.1f : 0.0f});
  }
  check(2500 * 7, 0, segments);
}

TEST_F(AdamwGpuTest, ASkippedStepChangesNothing) {
  StepControl skip = kControl;
  skip.apply = 0;
  for (const DType moments : activation_dtypes()) {
    const State before(1001, moments);
    const State after(1001, moments);
    before.upload();
    after.upload();
    after.step(skip, 0, 1001, {{0, 900, 0.1f}, {901, 1001, 0.0f}});
    expect_equal(before.weight, after.weight);
    expect_equal(before.m, after.m);
    expect_equal(before.v, after.v);
    expect_equal(before.low, after.low);
  }
}

// Moments in bfloat16: the update computes as with float32 ones that hold the same numbers, and
// each stored moment is one of the two neighbours of the exact one.
TEST_F(AdamwGpuTest, Bfloat16MomentsAreRoundedToANeighbour) {
  const int64_t n = 5003;
  const State narrow(n, DType::kBFloat16);
  State wide(n, DType::kFloat32);
  wide.m.restore(narrow.m.save());
  wide.v.restore(narrow.v.save());
  narrow.upload();
  wide.upload();
  for (const State* state : {&narrow, static_cast<const State*>(&wide)}) {
    state->step(kControl, 0, n, {{0, n, 0.1f, 1}});
  }
  expect_equal(narrow.weight, wide.weight);
  const auto near = [](const Operand& rounded, const Operand& exact) {
    const auto r = rounded.download();
    const auto e = exact.download();
    for (size_t i = 0; i < r.size(); ++i) {
      const auto bits = std::bit_cast<uint32_t>(static_cast<float>(e[i]));
      const double down = std::bit_cast<float>(bits & 0xffff0000u);
      const double up = std::bit_cast<float>((bits & 0xffff0000u) + 0x10000u);
      ASSERT_TRUE(r[i] == down || r[i] == up) << i << ": " << r[i] << " of " << e[i];
    }
  };
  near(narrow.m, wide.m);
  near(narrow.v, wide.v);
}

// The mean of many roundings of one number is that number, to five standard errors; with β close to
// one, rounding to nearest would never move it.
TEST_F(AdamwGpuTest, StochasticRoundingIsUnbiased) {
  const int64_t n = 1 << 18;
  State state(n, DType::kBFloat16);
  fill_random(state.m.host(), 0, 0.0, 1.0);
  fill_random(state.v.host(), 0, 0.0, 1.0);
  fill_random(state.grad.host(), 0, 0.0, 8.0 * 3.0);
  state.upload();
  state.step(kControl, 0, n, {{0, n, 0.0f}}, {.beta1 = 0.9997, .beta2 = 0.9999});
  const auto check_mean = [&](const Operand& moment, double exact) {
    double mean = 0.0;
    for (const double x : moment.download()) mean += x / static_cast<double>(n);
    const double spacing = 0x1p-7;  // of bfloat16 from 1 to 2
    const double p = (exact - 1.0) / spacing;
    EXPECT_NEAR(mean, exact, 5 * spacing * std::sqrt(p * (1 - p) / n) + 1e-6);
  };
  check_mean(state.m, 0.9997 + 0.0003 * 3.0);
  check_mean(state.v, 0.9999 + 0.0001 * 9.0);
}

// Rounding is a function of (seed, update, index): not of the shard's cuts, of alignment or of how
// segments are merged; and it does depend on each of the three.
TEST_F(AdamwGpuTest, StochasticRoundingFollowsTheIndex) {
  const int64_t n = 10001;
  const auto run = [&](const StepControl& control, const AdamwOptions& options,
                       const std::vector<int64_t>& cuts, int64_t first_index) {
    auto state = std::make_unique<State>(n, DType::kBFloat16);
    state->upload();
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      const int64_t size = cuts[i + 1] - cuts[i];
      const int64_t index = first_index + cuts[i];
      state->step(control, cuts[i], cuts[i + 1],
                  {{0, size / 2, 0.1f, index}, {size / 2, size, 0.1f, index + size / 2}}, options);
    }
    return state;
  };
  const auto whole = run(kControl, kOptions, {0, n}, 12);
  const auto parts = run(kControl, kOptions, {0, 1, 1024, 4099, n}, 12);
  expect_equal(whole->m, parts->m);
  expect_equal(whole->v, parts->v);
  StepControl next = kControl;
  ++next.updates;
  AdamwOptions other = kOptions;
  ++other.rounding_seed;
  for (const auto& different : {run(next, kOptions, {0, n}, 12), run(kControl, other, {0, n}, 12),
                                run(kControl, kOptions, {0, n}, 16)}) {
    EXPECT_NE(whole->m.download(), different->m.download());
  }
}

}  // namespace
}  // namespace muster
