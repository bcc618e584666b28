// A tiny run without coordinator and data service: for tests of the step and its memory.
#pragma once

#include <string>
#include <vector>

#include "worker/comm/single_communicator.h"
#include "worker/model/testing.h"
#include "worker/train/train_step.h"

namespace muster::testing {

inline Config tiny_run(const std::string& family) {
  Config config;
  config.model = tiny_model(family);
  config.train.sequence_length = 12;
  config.train.micro_batch = 2;
  config.train.global_batch = 6;
  config.optimizer.lr = 3e-3;
  return config;
}

struct TinyStep {
  double loss;
  double grad_norm;
};

// Makes `count` steps of random batches, three passes each, from the config's seed.
inline std::vector<TinyStep> make_steps(TrainStep& step, const Config& config, int count) {
  const Deadline deadline = Deadline::after(std::chrono::seconds(60));
  std::vector<TinyStep> steps;
  step.parameters().initialise(config.run.seed);
  for (int i = 0; i < count; ++i) {
    step.begin(3);
    for (int pass = 0; pass < 3; ++pass) {
      const RandomBatch batch(static_cast<uint64_t>(3 * i + pass), config.train.micro_batch,
                              config.train.sequence_length, config.model.vocab_size);
      step.train(batch.batch());
    }
    step.update(config.optimizer.lr);
    const StepControl control = step.outcome(0, deadline);
    steps.push_back({control.loss, control.grad_norm});
  }
  return steps;
}

}  // namespace muster::testing
