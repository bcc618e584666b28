// Replays the training runs that make_golden.py made with PyTorch: the same initial weights and
// batches must give the same losses and gradient norms, step by step.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/error.h"
#include "kernels/adamw/adamw.h"
#include "kernels/global_norm/global_norm.h"
#include "worker/comm/communicator.h"
#include "worker/model/local_parameters.h"
#include "worker/model/model.h"
#include "worker/model/testing.h"
#include "worker/sharding/sharded_parameters.h"
#include "worker/sharding/testing.h"
#include "worker/train/schedule.h"

namespace muster {
namespace {

using nlohmann::json;

// float32 against float64 over 20 AdamW steps; measured: below 1e-6.
constexpr double kTolerance = 1e-5;

std::ifstream open_fixture(const std::string& name) {
  std::ifstream file(std::string(MUSTER_GOLDEN_DIR) + "/" + name, std::ios::binary);
  file.exceptions(std::ios::failbit | std::ios::badbit);
  EXPECT_TRUE(file.is_open()) << name;
  return file;
}

// The fixtures' initial weights by parameter name.
class Weights {
 public:
  explicit Weights(const std::string& name) {
    std::ifstream file = open_fixture(name);
    uint64_t length = 0;
    file.read(reinterpret_cast<char*>(&length), sizeof length);
    std::string text(length, ' ');
    file.read(text.data(), static_cast<std::streamsize>(length));
    header_ = json::parse(text);
    file.exceptions(std::ios::badbit);
    data_.assign(std::istreambuf_iterator<char>(file), {});
  }
  size_t size() const { return header_.size(); }

  void copy_to(const ParameterSpec& spec, float* out) const {
    const json& entry = header_.at(spec.name);
    EXPECT_EQ(Shape(entry.at("shape").get<std::vector<int64_t>>()), spec.shape) << spec.name;
    const auto begin = entry.at("data_offsets").at(0).get<size_t>();
    std::memcpy(out, data_.data() + begin, spec.shape.numel() * sizeof(float));
  }

 private:
  json header_;
  std::vector<char> data_;
};

ModelConfig model_config(const json& j) {
  ModelConfig config;
  config.family = j.at("family");
  config.vocab_size = j.at("vocab_size");
  config.width = j.at("width");
  config.layers = j.at("layers");
  config.heads = j.at("heads");
  config.kv_heads = j.at("kv_heads");
  config.head_dim = j.at("head_dim");
  config.ffn = j.at("ffn");
  config.norm_eps = j.at("norm_eps");
  config.tie_embeddings = j.at("tie_embeddings");
  config.qkv_bias = j.at("qkv_bias");
  config.qk_norm = j.at("qk_norm");
  config.causal = j.at("causal");
  config.rope_theta = j.at("rope_theta");
  config.rope_scaling = j.at("rope_scaling");
  config.rope_factor = j.at("rope_factor");
  config.rope_low_freq_factor = j.at("rope_low_freq_factor");
  config.rope_high_freq_factor = j.at("rope_high_freq_factor");
  config.rope_original_positions = j.at("rope_original_positions");
  config.max_positions = j.at("max_positions");
  return config;
}

OptimizerConfig optimizer_config(const json& j) {
  OptimizerConfig config;
  config.lr = j.at("lr");
  config.beta1 = j.at("beta1");
  config.beta2 = j.at("beta2");
  config.eps = j.at("eps");
  config.weight_decay = j.at("weight_decay");
  config.clip_norm = j.at("clip_norm");
  return config;
}

struct GoldenStep {
  std::vector<int32_t> tokens, targets, positions, cu_seqlens;
  double lr = 0;
  double loss = 0;
  double grad_norm = 0;

  explicit GoldenStep(const json& j)
      : tokens(j.at("tokens")),
        targets(j.at("targets")),
        positions(j.at("positions")),
        cu_seqlens(j.at("cu_seqlens")),
        lr(j.at("lr")),
        loss(j.at("loss")),
        grad_norm(j.at("grad_norm")) {}

  Batch batch(int64_t samples) const {
    const auto view = [](const std::vector<int32_t>& v) {
      return ConstTensorView(v.data(), DType::kInt32, {static_cast<int64_t>(v.size())});
    };
    Batch batch;
    batch.samples = samples;
    batch.sequence_length = static_cast<int64_t>(tokens.size()) / samples;
    batch.tokens = view(tokens);
    batch.targets = view(targets);
    batch.positions = view(positions);
    batch.cu_seqlens = view(cu_seqlens);
    batch.max_segment = 1 + *std::max_element(positions.begin(), positions.end());
    batch.target_tokens = static_cast<int64_t>(
        std::count_if(targets.begin(), targets.end(), [](int32_t t) { return t >= 0; }));
    return batch;
  }
};

struct Golden {
  explicit Golden(const std::string& name) : weights(name + ".safetensors") {
    std::ifstream file = open_fixture(name + ".json");
    const json j = json::parse(file);
    model = model_config(j.at("model"));
    optimizer = optimizer_config(j.at("optimizer"));
    schedule.type = j.at("schedule").at("type");
    schedule.warmup_steps = j.at("schedule").at("warmup_steps");
    schedule.min_lr_ratio = j.at("schedule").at("min_lr_ratio");
    samples = j.at("samples");
    sequence_length = j.at("sequence_length");
    for (const json& step : j.at("steps")) steps.emplace_back(step);
  }
  Weights weights;
  ModelConfig model;
  OptimizerConfig optimizer;
  ScheduleConfig schedule;
  int64_t samples = 0;
  int64_t sequence_length = 0;
  std::vector<GoldenStep> steps;
};

// AdamW over whole units in this process, straight from the kernels.
class LocalOptimizer {
 public:
  explicit LocalOptimizer(LocalParameters& parameters) : parameters_(parameters) {
    for (const UnitSpec& unit : parameters.units()) {
      m_.push_back(Tensor::zeros({unit.numel()}, DType::kFloat32));
      v_.push_back(Tensor::zeros({unit.numel()}, DType::kFloat32));
    }
  }

  // Applies update `number` (from 1) to gradients summed over `tokens`; returns the norm of the
  // mean gradient before clipping.
  double update(const OptimizerConfig& config, double lr, int64_t number, int64_t tokens) {
    const Tensor sums = Tensor::zeros({3}, DType::kFloat64);
    for (size_t unit = 0; unit < m_.size(); ++unit) {
      sum_of_squares({}, sums.view().slice(0, 1),
                     parameters_.flat_gradients(static_cast<int>(unit)));
    }
    sums.data<double>()[2] = static_cast<double>(tokens);
    decide_step(
        {}, control_, sums,
        {.lr = lr, .beta1 = config.beta1, .beta2 = config.beta2, .clip_norm = config.clip_norm});
    StepControl control;
    std::memcpy(&control, control_.view().raw(), sizeof(control));
    EXPECT_EQ(control.updates, number);
    const AdamwOptions options{
        .lr = lr, .beta1 = config.beta1, .beta2 = config.beta2, .eps = config.eps};
    for (size_t unit = 0; unit < m_.size(); ++unit) {
      std::vector<AdamwSegment> segments;
      const UnitSpec& spec = parameters_.units()[unit];
      for (size_t p = 0; p < spec.parameters.size(); ++p) {
        const double decay = spec.parameters[p].decay ? config.weight_decay : 0.0;
        segments.push_back({spec.offset(p), spec.offset(p + 1), static_cast<float>(decay)});
      }
      adamw_step({}, parameters_.flat_weights(static_cast<int>(unit)), m_[unit], v_[unit], {},
                 parameters_.flat_gradients(static_cast<int>(unit)), control_, segments, options);
    }
    return control.grad_norm;
  }

 private:
  LocalParameters& parameters_;
  std::vector<Tensor> m_;
  std::vector<Tensor> v_;
  Tensor control_ = Tensor::zeros({sizeof(StepControl)}, DType::kUInt8);
};

class GoldenRun : public ::testing::TestWithParam<const char*> {
 protected:
  // Copies the initial weights of a unit to where its flat weights lie.
  void copy_weights(const UnitSpec& unit, float* flat) {
    for (size_t p = 0; p < unit.parameters.size(); ++p) {
      golden_.weights.copy_to(unit.parameters[p], flat + unit.offset(p));
    }
    copied_ += unit.parameters.size();
  }

  // Makes the 20 steps. `train` gets a batch and returns its summed loss, `update` gets learning
  // rate, number of the update and target tokens, and returns the norm of the mean gradient.
  void replay(const std::function<double(const Batch&)>& train,
              const std::function<double(double, int64_t, int64_t)>& update) {
    EXPECT_EQ(copied_, golden_.weights.size());
    const auto steps = static_cast<int64_t>(golden_.steps.size());
    ASSERT_EQ(steps, 20);
    for (int64_t number = 1; number <= steps; ++number) {
      SCOPED_TRACE("step " + std::to_string(number));
      const GoldenStep& want = golden_.steps[number - 1];
      const double lr = learning_rate(golden_.schedule, golden_.optimizer.lr, number, steps);
      ASSERT_NEAR(lr, want.lr, 1e-12);
      const Batch batch = want.batch(golden_.samples);
      const double loss = train(batch) / static_cast<double>(batch.target_tokens);
      ASSERT_NEAR(loss, want.loss, kTolerance * want.loss);
      const double norm = update(lr, number, batch.target_tokens);
      ASSERT_NEAR(norm, want.grad_norm, kTolerance * want.grad_norm);
    }
  }

  const Golden golden_{GetParam()};
  size_t copied_ = 0;
};

TEST_P(GoldenRun, LocalParametersMatchPyTorch) {
  const Model model(golden_.model, golden_.sequence_length, {});
  LocalParameters parameters(model.units());
  for (size_t u = 0; u < model.units().size(); ++u) {
    copy_weights(model.units()[u], parameters.flat_weights(static_cast<int>(u)).data<float>());
  }
  LocalOptimizer optimizer(parameters);
  replay(
      [&](const Batch& batch) {
        parameters.clear_gradients();
        return testing::train_on(model, parameters, batch);
      },
      [&](double lr, int64_t number, int64_t tokens) {
        return optimizer.update(golden_.optimizer, lr, number, tokens);
      });
}

class NoStore : public Store {
 public:
  void set(const std::string& key, const std::string&) override { FAIL() << key; }
  std::string get(const std::string& key, Deadline) override { throw PeerError(key); }
};

TEST_P(GoldenRun, ShardedParametersMatchPyTorch) {
  const Model model(golden_.model, golden_.sequence_length, {});
  NoStore store;
  CommunicatorOptions options;
  options.backend = "single";
  const auto communicator = make_communicator(options, store);
  ShardedParameters parameters(model.units(), *communicator, {}, {});
  for (const ShardState& state : parameters.state()) {
    const UnitSpec& unit = model.units()[state.unit];
    ASSERT_EQ(state.range, (Range{0, unit.numel()}));
    copy_weights(unit, state.weight.data<float>());
    for (const TensorView& moment : {state.m, state.v}) {
      std::memset(moment.raw(), 0, moment.bytes());
    }
  }
  parameters.weights_changed();
  testing::HostStep figures;
  replay(
      [&](const Batch& batch) {
        parameters.begin_step(1);
        const double loss =
            testing::train_on(model, parameters, batch, CheckpointPolicy::parse("block"));
        figures.begin();
        figures.add(loss, static_cast<double>(batch.target_tokens));
        return loss;
      },
      [&](double lr, int64_t number, int64_t /*tokens*/) {
        const StepControl control = figures.update(parameters, golden_.optimizer, lr);
        EXPECT_EQ(control.updates, number);
        return control.grad_norm;
      });
}

INSTANTIATE_TEST_SUITE_P(Golden, GoldenRun, ::testing::Values("llama", "llama_options", "gpt2"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace muster
