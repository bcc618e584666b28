#include "worker/model/model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "common/error.h"
#include "worker/model/local_parameters.h"
#include "worker/model/testing.h"

namespace muster {
namespace {

using testing::loss_of;
using testing::RandomBatch;
using testing::tiny_model;
using testing::train_on;

constexpr int64_t kPositions = 16;

// Weights of every kind away from the ones and zeros that they start at.
void randomise(LocalParameters& parameters) {
  parameters.initialise(3);
  for (size_t unit = 0; unit < parameters.units().size(); ++unit) {
    const TensorView flat = parameters.flat_weights(static_cast<int>(unit));
    const CounterRng rng(5, RandomPurpose::kInit, unit);
    for (int64_t i = 0; i < flat.numel(); ++i) {
      flat.data<float>()[i] += static_cast<float>(0.1 * rng.normal(i));
    }
  }
}

std::vector<float> all_gradients(LocalParameters& parameters) {
  std::vector<float> all;
  for (size_t unit = 0; unit < parameters.units().size(); ++unit) {
    const TensorView flat = parameters.flat_gradients(static_cast<int>(unit));
    all.insert(all.end(), flat.data<float>(), flat.data<float>() + flat.numel());
  }
  return all;
}

struct Case {
  const char* name;
  ModelConfig config;
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.name;
}

ModelConfig with(ModelConfig config, const std::function<void(ModelConfig&)>& change) {
  change(config);
  return config;
}

std::vector<Case> cases() {
  const ModelConfig llama = tiny_model("llama");
  const ModelConfig gpt2 = tiny_model("gpt2");
  return {
      {"llama", llama},
      {"llama_untied", with(llama, [](ModelConfig& c) { c.tie_embeddings = false; })},
      {"llama_multi_query", with(llama, [](ModelConfig& c) { c.kv_heads = 1; })},
      {"llama_every_option", with(llama,
                                  [](ModelConfig& c) {
                                    c.qk_norm = true;
                                    c.qkv_bias = true;
                                    c.rope_scaling = "llama3";
                                    c.rope_factor = 4;
                                    c.rope_original_positions = 12;
                                    c.head_dim = 10;  // heads · head_dim ≠ width
                                  })},
      {"llama_bidirectional", with(llama, [](ModelConfig& c) { c.causal = false; })},
      {"gpt2", gpt2},
      {"gpt2_untied", with(gpt2, [](ModelConfig& c) { c.tie_embeddings = false; })},
  };
}

class ModelCase : public ::testing::TestWithParam<Case> {};

// Central differences of fourth order: with steps this large the rounding of the float32 forward
// stays small against the change of the loss, and the truncation error is O(step⁴).
double slope(const std::function<double(double)>& f, double step) {
  return (8 * (f(step) - f(-step)) - (f(2 * step) - f(-2 * step))) / (12 * step);
}

TEST_P(ModelCase, GradientsMatchFiniteDifferences) {
  const Model model(GetParam().config, kPositions, {});
  LocalParameters parameters(model.units());
  randomise(parameters);
  const RandomBatch data(11, 2, 13, GetParam().config.vocab_size);
  const Batch batch = data.batch();
  ASSERT_GT(data.cu_seqlens.size(), 4U) << "documents must be packed";
  train_on(model, parameters, batch);

  const CounterRng rng(17, RandomPurpose::kInit, 0);
  for (size_t u = 0; u < model.units().size(); ++u) {
    const UnitSpec& unit = model.units()[u];
    auto* weights = parameters.flat_weights(static_cast<int>(u)).data<float>();
    const auto* gradients = parameters.flat_gradients(static_cast<int>(u)).data<float>();
    for (size_t p = 0; p < unit.parameters.size(); ++p) {
      const int64_t begin = unit.offset(p);
      const int64_t numel = unit.parameters[p].shape.numel();
      double largest = 0;
      for (int64_t i = 0; i < numel; ++i) {
        largest = std::max(largest, std::abs(static_cast<double>(gradients[begin + i])));
      }
      // One-dimensional parameters and small matrices whole, the others at random places.
      const int64_t checks = std::min<int64_t>(numel, 40);
      for (int64_t check = 0; check < checks; ++check) {
        const int64_t i = begin + (checks == numel ? check : rng.bits(check) % numel);
        const float at = weights[i];
        const double difference = slope(
            [&](double step) {
              weights[i] = static_cast<float>(at + step);
              return loss_of(model, parameters, batch);
            },
            0.02);
        weights[i] = at;
        ASSERT_NEAR(gradients[i], difference, 2e-3 * largest + 2e-4)
            << unit.parameters[p].name << " element " << i - begin << ", largest gradient "
            << largest;
      }
    }
  }
}

TEST_P(ModelCase, ForwardIsBitwiseTheTrainingLoss) {
  const Model model(GetParam().config, kPositions, {});
  LocalParameters parameters(model.units());
  randomise(parameters);
  const RandomBatch data(23, 3, 13, GetParam().config.vocab_size);
  const double loss = loss_of(model, parameters, data.batch());
  EXPECT_EQ(loss, train_on(model, parameters, data.batch()));
  EXPECT_GT(loss, 0.0);
}

TEST_P(ModelCase, GradientsAccumulateOverMicroBatches) {
  const Model model(GetParam().config, kPositions, {});
  LocalParameters parameters(model.units());
  randomise(parameters);
  const RandomBatch data(29, 2, 13, GetParam().config.vocab_size);
  train_on(model, parameters, data.batch());
  const std::vector<float> once = all_gradients(parameters);
  train_on(model, parameters, data.batch());
  const std::vector<float> twice = all_gradients(parameters);
  double norm = 0;
  double error = 0;
  for (size_t i = 0; i < once.size(); ++i) {
    norm += once[i] * once[i];
    error += std::pow(twice[i] - 2.0 * once[i], 2);
  }
  EXPECT_GT(norm, 0.0);
  EXPECT_LT(error, 1e-10 * norm);
}

TEST_P(ModelCase, NextTokenLogitsAgreeWithTheLoss) {
  const Model model(GetParam().config, kPositions, {});
  LocalParameters parameters(model.units());
  randomise(parameters);
  const std::vector<int32_t> tokens = {4, 36, 0, 17, 17, 9, 2};
  const std::vector<float> logits = model.next_token_logits(parameters, tokens);
  ASSERT_EQ(logits.size(), static_cast<size_t>(GetParam().config.vocab_size));
  RandomBatch data(31, 1, 7, GetParam().config.vocab_size);
  data.tokens = tokens;
  data.positions = {0, 1, 2, 3, 4, 5, 6};
  data.cu_seqlens = {0, 7};
  data.targets.assign(7, kIgnoredTarget);
  data.targets.back() = 5;
  double sum = 0;
  for (const float z : logits) sum += std::exp(static_cast<double>(z));
  EXPECT_NEAR(loss_of(model, parameters, data.batch()), std::log(sum) - logits[5], 1e-5);
}

TEST_P(ModelCase, PackedDocumentsDoNotSeeEachOther) {
  const Model model(GetParam().config, kPositions, {});
  LocalParameters parameters(model.units());
  randomise(parameters);
  const RandomBatch data(37, 2, 13, GetParam().config.vocab_size);
  double apart = 0;
  for (size_t d = 0; d + 1 < data.cu_seqlens.size(); ++d) {
    const auto cut = [&](const std::vector<int32_t>& v) {
      return std::vector<int32_t>(v.begin() + data.cu_seqlens[d],
                                  v.begin() + data.cu_seqlens[d + 1]);
    };
    RandomBatch one(0, 1, 1, 2);
    one.tokens = cut(data.tokens);
    one.targets = cut(data.targets);
    one.positions = cut(data.positions);
    one.cu_seqlens = {0, static_cast<int32_t>(one.tokens.size())};
    apart += loss_of(model, parameters, one.batch());
  }
  EXPECT_NEAR(loss_of(model, parameters, data.batch()), apart, 1e-5 * apart);
}

INSTANTIATE_TEST_SUITE_P(Model, ModelCase, ::testing::ValuesIn(cases()),
                         [](const auto& test) { return test.param.name; });

// Holds the model to the contract of Parameters: units are used in the announced order, weights are
// gone once released, fresh gradients are overwritten, and nothing is added to those that were
// declared done.
class StrictParameters : public Parameters {
 public:
  explicit StrictParameters(LocalParameters& local) : local_(local) {}

  void begin_pass(std::vector<int> use_order) override {
    expect_pass_complete();
    order_ = std::move(use_order);
    next_ = 0;
    done_.clear();
  }
  UnitWeights use(int unit) override {
    EXPECT_EQ(unit, next_ < order_.size() ? order_[next_] : -1) << "use number " << next_;
    ++next_;
    EXPECT_FALSE(lent_.contains(unit)) << "unit " << unit << " is used already";
    UnitWeights views;
    for (const ConstTensorView& source : local_.use(unit)) {
      Tensor& copy = lent_[unit].emplace_back(source.shape(), DType::kFloat32);
      std::memcpy(copy.view().raw(), source.raw(), source.bytes());
      views.push_back(copy);
    }
    return views;
  }
  void release(int unit) override {
    EXPECT_TRUE(lent_.contains(unit)) << "unit " << unit << " is not in use";
    for (const Tensor& copy : lent_[unit]) {
      std::fill_n(copy.data<float>(), copy.numel(), std::numeric_limits<float>::quiet_NaN());
      released_.push_back(copy);
    }
    lent_.erase(unit);
  }
  UnitGradients gradients(int unit) override {
    EXPECT_EQ(done_[unit], 0) << "unit " << unit << " was declared done";
    UnitGradients gradients = local_.gradients(unit);
    gradients.fresh = touched_.insert(unit).second;
    const auto& specs = local_.units()[unit].parameters;
    for (size_t i = 0; gradients.fresh && i < specs.size(); ++i) {
      if (!specs[i].written_first) continue;
      std::fill_n(gradients[i].data<float>(), gradients[i].numel(),
                  std::numeric_limits<float>::quiet_NaN());
    }
    return gradients;
  }
  void gradients_done(int unit) override { ++done_[unit]; }

  void expect_pass_complete() const {
    EXPECT_EQ(next_, order_.size());
    EXPECT_TRUE(lent_.empty());
  }
  void expect_all_done_once() const {
    EXPECT_EQ(done_.size(), local_.units().size());
    for (const auto& [unit, times] : done_) EXPECT_EQ(times, 1) << "unit " << unit;
  }

 private:
  LocalParameters& local_;
  std::vector<int> order_;
  size_t next_ = 0;
  std::map<int, int> done_;
  std::set<int> touched_;
  std::map<int, std::vector<Tensor>> lent_;
  std::vector<Tensor> released_;
};

struct Result {
  double loss = 0;
  std::vector<float> gradients;
  size_t peak_bytes = 0;
};

Result train_once(const ModelConfig& config, const std::string& policy) {
  HostAllocator allocator;
  ComputeContext context;
  context.allocator = &allocator;
  const Model model(config, kPositions, context);
  const size_t lasting = allocator.bytes_in_use();
  LocalParameters local(model.units());
  randomise(local);
  StrictParameters strict(local);
  const RandomBatch data(41, 2, 13, config.vocab_size);
  Result result;
  result.loss = train_on(model, strict, data.batch(), CheckpointPolicy::parse(policy));
  strict.expect_pass_complete();
  strict.expect_all_done_once();
  EXPECT_EQ(loss_of(model, strict, data.batch()), result.loss);
  strict.expect_pass_complete();
  model.next_token_logits(strict, {1, 2, 3});
  strict.expect_pass_complete();
  EXPECT_EQ(allocator.bytes_in_use(), lasting);
  result.gradients = all_gradients(local);
  result.peak_bytes = allocator.peak_bytes();
  return result;
}

TEST(CheckpointPolicy, ChangesNoBit) {
  for (const char* family : {"llama", "gpt2"}) {
    for (const bool tied : {true, false}) {
      ModelConfig config = tiny_model(family);
      config.layers = 5;
      config.tie_embeddings = tied;
      const Result kept = train_once(config, "none");
      EXPECT_TRUE(std::isfinite(kept.loss));
      for (const char* policy :
           {"block", "selective", "every:2", "every:3", "every:4", "every:9"}) {
        SCOPED_TRACE(std::string(family) + (tied ? " tied " : " untied ") + policy);
        const Result result = train_once(config, policy);
        EXPECT_EQ(result.loss, kept.loss);
        ASSERT_EQ(result.gradients.size(), kept.gradients.size());
        EXPECT_EQ(std::memcmp(result.gradients.data(), kept.gradients.data(),
                              kept.gradients.size() * sizeof(float)),
                  0);
      }
    }
  }
}

TEST(CheckpointPolicy, SavesMemory) {
  ModelConfig config = tiny_model("llama");
  config.layers = 12;
  const size_t none = train_once(config, "none").peak_bytes;
  const size_t block = train_once(config, "block").peak_bytes;
  const size_t every3 = train_once(config, "every:3").peak_bytes;
  EXPECT_LT(block, none / 3);
  EXPECT_LT(every3, none / 2);
  const size_t selective = train_once(config, "selective").peak_bytes;
  EXPECT_LT(block, selective);
  EXPECT_LT(selective, none / 2);
}

TEST(CheckpointPolicy, Parses) {
  EXPECT_EQ(CheckpointPolicy::parse("none").segment, 0);
  EXPECT_EQ(CheckpointPolicy::parse("block").segment, 1);
  EXPECT_FALSE(CheckpointPolicy::parse("block").keep_attention);
  EXPECT_EQ(CheckpointPolicy::parse("selective").segment, 1);
  EXPECT_TRUE(CheckpointPolicy::parse("selective").keep_attention);
  EXPECT_EQ(CheckpointPolicy::parse("every:12").segment, 12);
  for (const char* bad : {"", "every", "every:", "every:0", "every:-1", "every:2x", "blocks"}) {
    EXPECT_THROW(CheckpointPolicy::parse(bad), ConfigError) << bad;
  }
}

TEST(Model, BidirectionalSeesWhatFollows) {
  ModelConfig config = tiny_model("llama");
  RandomBatch data(0, 1, 1, 2);
  data.tokens = {3, 1, 4, 1, 5};
  data.targets = {1, kIgnoredTarget, kIgnoredTarget, kIgnoredTarget, kIgnoredTarget};
  data.positions = {0, 1, 2, 3, 4};
  data.cu_seqlens = {0, 5};
  for (const bool causal : {true, false}) {
    config.causal = causal;
    const Model model(config, kPositions, {});
    LocalParameters parameters(model.units());
    randomise(parameters);
    data.tokens.back() = 5;
    const double before = loss_of(model, parameters, data.batch());
    data.tokens.back() = 9;
    EXPECT_EQ(loss_of(model, parameters, data.batch()) == before, causal);
  }
}

}  // namespace
}  // namespace muster
