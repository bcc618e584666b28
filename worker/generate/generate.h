// Text from a checkpoint: the whole model in this process, one token after the other.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "worker/generate/sampler.h"

namespace muster {

struct GenerateOptions {
  int64_t tokens = 200;
  SamplingOptions sampling = {};
  uint64_t seed = 1;
};

// Continues `prompt` by at most `options.tokens` tokens (fewer when the model ends the document)
// and returns the continuation. The model sees the last train.sequence_length tokens. `on_token`,
// if set, gets the bytes of each token as it comes, which need not be whole characters.
//
// `path`: a checkpoint folder, or a run directory, whose newest whole checkpoint is taken.
// Throws CheckpointError (no checkpoint there, damaged, …) and UsageError (empty prompt, bad
// option).
std::string generate(const std::string& path, const std::string& prompt,
                     const GenerateOptions& options,
                     const std::function<void(std::string_view)>& on_token = {});

}  // namespace muster
