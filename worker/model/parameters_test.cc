#include "worker/model/parameters.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "worker/model/local_parameters.h"
#include "worker/model/model.h"
#include "worker/model/testing.h"

namespace muster {
namespace {

using testing::tiny_model;

std::vector<std::string> names_of(const UnitSpec& unit) {
  std::vector<std::string> names;
  for (const ParameterSpec& spec : unit.parameters) names.push_back(spec.name);
  return names;
}

TEST(Units, OfATiedLlama) {
  ModelConfig config = tiny_model("llama");
  config.qk_norm = true;
  config.qkv_bias = true;
  const Model model(config, 16, {});
  const std::vector<UnitSpec>& units = model.units();
  ASSERT_EQ(units.size(), 4U);
  EXPECT_EQ(units[0].name, "embedding");
  EXPECT_EQ(names_of(units[0]), std::vector<std::string>{"embedding.tokens.weight"});
  EXPECT_EQ(units[2].name, "blocks.1");
  EXPECT_EQ(
      names_of(units[2]),
      (std::vector<std::string>{"blocks.1.attention_norm.weight", "blocks.1.attention.qkv.weight",
                                "blocks.1.attention.qkv.bias", "blocks.1.attention.out.weight",
                                "blocks.1.attention.q_norm.weight",
                                "blocks.1.attention.k_norm.weight", "blocks.1.mlp_norm.weight",
                                "blocks.1.mlp.gate_up.weight", "blocks.1.mlp.down.weight"}));
  EXPECT_EQ(names_of(units[3]), std::vector<std::string>{"head.norm.weight"});
  // qkv: (4 + 2 · 2) heads of 6, from 24.
  EXPECT_EQ(units[2].parameters[1].shape, Shape({48, 24}));
  EXPECT_EQ(units[2].offset(2), 24 + 48 * 24);
  const int64_t block = 24 + 48 * 24 + 48 + 24 * 24 + 6 + 6 + 24 + 40 * 24 + 24 * 20;
  EXPECT_EQ(units[2].numel(), block);
  EXPECT_EQ(model.parameter_count(), 37 * 24 + 2 * block + 24);
}

TEST(Units, OfAnUntiedGpt2) {
  ModelConfig config = tiny_model("gpt2");
  config.tie_embeddings = false;
  const Model model(config, 16, {});
  EXPECT_EQ(names_of(model.units()[0]),
            (std::vector<std::string>{"embedding.tokens.weight", "embedding.positions.weight"}));
  EXPECT_EQ(names_of(model.units()[1]),
            (std::vector<std::string>{
                "blocks.0.attention_norm.weight", "blocks.0.attention_norm.bias",
                "blocks.0.attention.qkv.weight", "blocks.0.attention.qkv.bias",
                "blocks.0.attention.out.weight", "blocks.0.attention.out.bias",
                "blocks.0.mlp_norm.weight", "blocks.0.mlp_norm.bias", "blocks.0.mlp.up.weight",
                "blocks.0.mlp.up.bias", "blocks.0.mlp.down.weight", "blocks.0.mlp.down.bias"}));
  EXPECT_EQ(names_of(model.units()[3]),
            (std::vector<std::string>{"head.norm.weight", "head.norm.bias", "head.weight"}));
}

TEST(Units, OnlyMatricesDecay) {
  for (const char* family : {"llama", "gpt2"}) {
    const Model model(tiny_model(family), 16, {});
    for (const UnitSpec& unit : model.units()) {
      for (const ParameterSpec& spec : unit.parameters) {
        EXPECT_EQ(spec.decay, spec.shape.rank == 2) << spec.name;
        EXPECT_EQ(spec.init == Init::kNormal, spec.shape.rank == 2) << spec.name;
      }
    }
  }
}

TEST(InitialValue, HasTheStandardDeviationOfItsKind) {
  ModelConfig config = tiny_model("gpt2");
  config.width = 64;
  config.head_dim = 16;
  config.ffn = 256;
  config.layers = 8;
  config.init_std = 0.02;
  const Model model(config, 16, {});
  LocalParameters parameters(model.units());
  parameters.initialise(1);
  const UnitSpec& unit = model.units()[1];
  for (size_t p = 0; p < unit.parameters.size(); ++p) {
    const ParameterSpec& spec = unit.parameters[p];
    double sum = 0;
    double squares = 0;
    const int64_t n = spec.shape.numel();
    const auto* values = parameters.use(1)[p].data<float>();
    for (int64_t i = 0; i < n; ++i) {
      sum += values[i];
      squares += values[i] * values[i];
    }
    const double mean = sum / static_cast<double>(n);
    const double deviation = std::sqrt(squares / static_cast<double>(n) - mean * mean);
    const bool residual = spec.name.ends_with("out.weight") || spec.name.ends_with("down.weight");
    if (spec.init == Init::kNormal) {
      EXPECT_NEAR(deviation, residual ? 0.02 / 4 : 0.02, 0.05 * 0.02) << spec.name;
      EXPECT_NEAR(mean, 0.0, 0.05 * 0.02) << spec.name;
    } else {
      EXPECT_EQ(mean, spec.init == Init::kOnes ? 1.0 : 0.0) << spec.name;
    }
  }
}

TEST(InitialValue, DependsOnSeedNameAndElement) {
  ParameterSpec spec{"a", {4}, Init::kNormal, 1.0, true};
  std::set<float> values;
  for (const char* name : {"a", "b"}) {
    for (const uint64_t seed : {1, 2}) {
      for (int64_t i = 0; i < 4; ++i) {
        spec.name = name;
        const Tensor value({1}, DType::kFloat32);
        fill_initial({}, value, seed, spec, i);
        values.insert(*value.data<float>());
      }
    }
  }
  EXPECT_EQ(values.size(), 16U);
}

TEST(LocalParameters, UnitsAreFlatAndClearable) {
  const Model model(tiny_model("gpt2"), 16, {});
  LocalParameters parameters(model.units());
  const UnitGradients gradients = parameters.gradients(1);
  const TensorView flat = parameters.flat_gradients(1);
  for (size_t p = 0; p < gradients.views.size(); ++p) {
    EXPECT_EQ(gradients[p].data<float>(), flat.data<float>() + model.units()[1].offset(p));
    EXPECT_EQ(gradients[p].shape(), model.units()[1].parameters[p].shape);
  }
  flat.data<float>()[7] = 3.0f;
  parameters.clear_gradients();
  EXPECT_EQ(flat.data<float>()[7], 0.0f);
}

}  // namespace
}  // namespace muster
