#include "worker/model/model.h"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <utility>

#include "common/error.h"
#include "kernels/rope/rope.h"
#include "kernels/runtime/profiler_range.h"
#include "kernels/runtime/runtime.h"
#include "worker/model/block.h"
#include "worker/model/embedding.h"
#include "worker/model/head.h"

namespace muster {
namespace {

std::vector<UnitSpec> name_units(const ModelConfig& config) {
  std::vector<UnitSpec> units(config.layers + 2);
  units.front().name = "embedding";
  for (int64_t i = 0; i < config.layers; ++i) units[i + 1].name = "blocks." + std::to_string(i);
  units.back().name = "head";
  return units;
}

std::vector<TransformerBlock> make_blocks(std::vector<UnitSpec>& units, const ModelConfig& config) {
  std::vector<TransformerBlock> blocks;
  blocks.reserve(config.layers);
  for (int64_t i = 0; i < config.layers; ++i) blocks.emplace_back(units[i + 1], config);
  return blocks;
}

Tensor make_rope(const ModelConfig& config, int64_t max_positions, const ComputeContext& context) {
  if (config.family == "gpt2") return {};
  const Tensor table({max_positions, 2, config.head_dim / 2}, DType::kFloat32);
  rope_table(table, {.theta = config.rope_theta,
                     .scaling = config.rope_scaling,
                     .factor = config.rope_factor,
                     .low_freq_factor = config.rope_low_freq_factor,
                     .high_freq_factor = config.rope_high_freq_factor,
                     .original_positions = config.rope_original_positions});
  Tensor there(table.shape(), DType::kFloat32, *context.allocator);
  copy(context.stream, there, table);
  return there;
}

}  // namespace

CheckpointPolicy CheckpointPolicy::parse(const std::string& text) {
  if (text == "none") return {};
  if (text == "block") return {.segment = 1};
  if (text == "selective") return {.segment = 1, .keep_attention = true};
  const std::string prefix = "every:";
  if (text.starts_with(prefix)) {
    int64_t n = 0;
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + prefix.size(), end, n);
    if (error == std::errc() && stop == end && n >= 1) return {.segment = n};
  }
  throw ConfigError(
      "memory.checkpoint = \"" + text +
      "\": use \"none\", \"block\", \"selective\" or \"every:N\" with N of 1 or more");
}

struct Model::Impl {
  // Blocks [begin, end) whose activations live and die together.
  struct Segment {
    int64_t begin;
    int64_t end;
    bool recompute;  // only the segment's input is kept, it is run again in backward
  };

  Impl(const ModelConfig& model_config, int64_t positions, const ComputeContext& compute)
      : config(model_config),
        max_positions(positions),
        context(compute),
        units(name_units(config)),
        embedding(units.front(), config),
        blocks(make_blocks(units, config)),
        head(units.back(), config),
        rope(make_rope(config, positions, context)) {}

  int embedding_unit() const { return 0; }
  int block_unit(int64_t block) const { return static_cast<int>(block) + 1; }
  int head_unit() const { return static_cast<int>(units.size()) - 1; }
  // Units that the head reads at once.
  std::vector<int> head_units() const {
    if (config.tie_embeddings) return {head_unit(), embedding_unit()};
    return {head_unit()};
  }

  std::vector<Segment> segments(const CheckpointPolicy& policy) const;
  std::vector<int> forward_order() const;
  std::vector<int> training_order(const std::vector<Segment>& segments) const;

  // What a profiler shows while a unit's work is enqueued: "blocks.0 backward".
  std::string range(int unit, const char* what) const { return units[unit].name + " " + what; }

  Pass pass(const Batch& batch) const;
  Tensor embed(const Pass& pass, Parameters& parameters) const;
  Tensor run(const Pass& pass, Parameters& parameters) const;
  Tensor train_head(const Pass& pass, Parameters& parameters, const Tensor& x,
                    TensorView loss_sum) const;
  void backward(const Pass& pass, Parameters& parameters, const Segment& segment, Tensor input,
                std::vector<TransformerBlock::Saved>& saved, TensorView grad) const;

  ModelConfig config;
  int64_t max_positions;
  ComputeContext context;
  std::vector<UnitSpec> units;
  Embedding embedding;
  std::vector<TransformerBlock> blocks;
  Head head;
  Tensor rope;
};

// The last segment is never recomputed: backward would run it again at once, while its activations
// are the only ones alive, so dropping them would save nothing.
std::vector<Model::Impl::Segment> Model::Impl::segments(const CheckpointPolicy& policy) const {
  const int64_t length = policy.segment == 0 ? 1 : policy.segment;
  std::vector<Segment> segments;
  for (int64_t begin = 0; begin < config.layers; begin += length) {
    segments.push_back({begin, std::min(begin + length, config.layers), policy.segment != 0});
  }
  if (!segments.empty()) segments.back().recompute = false;
  return segments;
}

std::vector<int> Model::Impl::forward_order() const {
  std::vector<int> order(blocks.size() + 1);
  std::iota(order.begin(), order.end(), embedding_unit());
  for (const int unit : head_units()) order.push_back(unit);
  return order;
}

std::vector<int> Model::Impl::training_order(const std::vector<Segment>& segments) const {
  std::vector<int> order = forward_order();
  for (auto segment = segments.rbegin(); segment != segments.rend(); ++segment) {
    int64_t last = segment->end - 1;
    if (segment->recompute) {
      // Forward again, then backward; the last block stays in use between the two.
      for (int64_t b = segment->begin; b < segment->end; ++b) order.push_back(block_unit(b));
      --last;
    }
    for (int64_t b = last; b >= segment->begin; --b) order.push_back(block_unit(b));
  }
  return order;
}

Pass Model::Impl::pass(const Batch& batch) const {
  MUSTER_CHECK(batch.max_segment <= max_positions);
  return {context, batch, rope.defined() ? ConstTensorView(rope) : ConstTensorView()};
}

Tensor Model::Impl::embed(const Pass& pass, Parameters& parameters) const {
  const ProfilerRange shown(range(embedding_unit(), "forward"));
  Tensor x = embedding.forward(pass, parameters.use(embedding_unit()));
  parameters.release(embedding_unit());
  return x;
}

// The last block's output; no activation outlives its block.
Tensor Model::Impl::run(const Pass& pass, Parameters& parameters) const {
  Tensor x = embed(pass, parameters);
  for (size_t b = 0; b < blocks.size(); ++b) {
    const ProfilerRange shown(range(block_unit(static_cast<int64_t>(b)), "forward"));
    TransformerBlock::Saved saved;
    x = blocks[b].forward(pass, std::move(x), parameters.use(block_unit(b)), saved);
    parameters.release(block_unit(b));
  }
  return x;
}

// The gradient of x.
Tensor Model::Impl::train_head(const Pass& pass, Parameters& parameters, const Tensor& x,
                               TensorView loss_sum) const {
  const ProfilerRange shown(range(head_unit(), "forward and backward"));
  const bool tied = config.tie_embeddings;
  const UnitWeights weights = parameters.use(head_unit());
  const UnitWeights embedding_weights = tied ? parameters.use(embedding_unit()) : UnitWeights();
  const UnitGradients gradients = parameters.gradients(head_unit());
  const UnitGradients embedding_gradients =
      tied ? parameters.gradients(embedding_unit()) : UnitGradients();
  Tensor grad = head.train(pass, loss_sum, x, weights, head.matrix(weights, embedding_weights),
                           gradients, embedding_gradients);
  for (const int unit : head_units()) parameters.release(unit);
  parameters.gradients_done(head_unit());
  return grad;
}

// Turns `grad` from the gradient of the segment's output into that of its input.
void Model::Impl::backward(const Pass& pass, Parameters& parameters, const Segment& segment,
                           Tensor input, std::vector<TransformerBlock::Saved>& saved,
                           TensorView grad) const {
  UnitWeights weights;
  if (segment.recompute) {
    Tensor x = std::move(input);
    for (int64_t b = segment.begin; b < segment.end; ++b) {
      const ProfilerRange shown(range(block_unit(b), "recomputed"));
      weights = parameters.use(block_unit(b));
      if (b + 1 == segment.end) {  // its output is known to the backward pass, as a gradient
        blocks[b].recompute(pass, std::move(x), weights, saved[b]);
        break;
      }
      x = blocks[b].forward(pass, std::move(x), weights, saved[b]);
      parameters.release(block_unit(b));
    }
  }
  for (int64_t b = segment.end - 1; b >= segment.begin; --b) {
    const ProfilerRange shown(range(block_unit(b), "backward"));
    const bool in_use = segment.recompute && b + 1 == segment.end;
    if (!in_use) weights = parameters.use(block_unit(b));
    blocks[b].backward(pass, grad, saved[b], weights, parameters.gradients(block_unit(b)));
    parameters.release(block_unit(b));
    parameters.gradients_done(block_unit(b));
  }
}

Model::Model(const ModelConfig& config, int64_t max_positions, const ComputeContext& context)
    : impl_(std::make_unique<Impl>(config, max_positions, context)) {}
Model::~Model() = default;

const ModelConfig& Model::config() const {
  return impl_->config;
}
const std::vector<UnitSpec>& Model::units() const {
  return impl_->units;
}

int64_t Model::parameter_count() const {
  int64_t count = 0;
  for (const UnitSpec& unit : impl_->units) count += unit.numel();
  return count;
}

double Model::training_flop(int64_t length) const {
  const ModelConfig& config = impl_->config;
  int64_t multiply = parameter_count();
  if (!config.tie_embeddings) multiply -= impl_->units.front().parameters.front().shape.numel();
  const double attention =
      2.0 * static_cast<double>(config.layers * config.heads * config.head_dim * length);
  return 6.0 * static_cast<double>(multiply) + 3.0 * attention * (config.causal ? 1.0 : 2.0);
}

void Model::forward_backward(Parameters& parameters, const Batch& batch,
                             const CheckpointPolicy& policy, TensorView loss_sum) const {
  const Impl& m = *impl_;
  const Pass pass = m.pass(batch);
  const std::vector<Impl::Segment> segments = m.segments(policy);
  parameters.begin_pass(m.training_order(segments));

  std::vector<Tensor> inputs;  // of the segments that are recomputed
  std::vector<TransformerBlock::Saved> saved(m.blocks.size());
  Tensor x = m.embed(pass, parameters);
  for (const Impl::Segment& segment : segments) {
    inputs.push_back(segment.recompute ? x : Tensor());
    for (int64_t b = segment.begin; b < segment.end; ++b) {
      const ProfilerRange shown(m.range(m.block_unit(b), "forward"));
      x = m.blocks[b].forward(pass, std::move(x), parameters.use(m.block_unit(b)), saved[b]);
      parameters.release(m.block_unit(b));
      if (segment.recompute) saved[b].drop(policy.keep_attention);
    }
  }
  const Tensor grad = m.train_head(pass, parameters, x, loss_sum);
  x = {};
  for (size_t s = segments.size(); s-- > 0;) {
    m.backward(pass, parameters, segments[s], std::move(inputs[s]), saved, grad);
  }
  const ProfilerRange shown(m.range(m.embedding_unit(), "backward"));
  m.embedding.backward(pass, grad, parameters.gradients(m.embedding_unit()));
  parameters.gradients_done(m.embedding_unit());
}

void Model::forward(Parameters& parameters, const Batch& batch, TensorView loss_sum) const {
  const Impl& m = *impl_;
  const Pass pass = m.pass(batch);
  parameters.begin_pass(m.forward_order());
  const Tensor x = m.run(pass, parameters);
  const UnitWeights weights = parameters.use(m.head_unit());
  const UnitWeights embedding =
      m.config.tie_embeddings ? parameters.use(m.embedding_unit()) : UnitWeights();
  m.head.loss(pass, loss_sum, x, weights, m.head.matrix(weights, embedding));
  for (const int unit : m.head_units()) parameters.release(unit);
}

std::vector<float> Model::next_token_logits(Parameters& parameters,
                                            const std::vector<int32_t>& tokens) const {
  const Impl& m = *impl_;
  const auto n = static_cast<int64_t>(tokens.size());
  MUSTER_CHECK(n >= 1 && n <= m.max_positions);
  std::vector<int32_t> positions(tokens.size());
  std::iota(positions.begin(), positions.end(), 0);
  const std::vector<int32_t> cu_seqlens = {0, static_cast<int32_t>(n)};
  Batch batch;
  batch.samples = 1;
  batch.sequence_length = n;
  batch.tokens = ConstTensorView(tokens.data(), DType::kInt32, {n});
  batch.positions = ConstTensorView(positions.data(), DType::kInt32, {n});
  batch.cu_seqlens = ConstTensorView(cu_seqlens.data(), DType::kInt32, {2});
  batch.max_segment = n;

  const Pass pass = m.pass(batch);
  parameters.begin_pass(m.forward_order());
  const Tensor x = m.run(pass, parameters);
  const UnitWeights weights = parameters.use(m.head_unit());
  const UnitWeights embedding =
      m.config.tie_embeddings ? parameters.use(m.embedding_unit()) : UnitWeights();
  std::vector<float> logits =
      m.head.last_logits(pass, x, weights, m.head.matrix(weights, embedding));
  for (const int unit : m.head_units()) parameters.release(unit);
  return logits;
}

}  // namespace muster
