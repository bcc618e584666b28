// Checks that need more than one key.
#pragma once

#include <functional>
#include <string>

#include "common/config/config.h"

namespace muster {

// Where a key was set, as the beginning of an error message: "demo.toml:12: model.heads", or
// without the line when the key has its default. Takes "section.name".
using ConfigPlace = std::function<std::string(const std::string& key)>;

// Throws ConfigError on values that are fine alone but not together.
void check_config(const Config& config, const ConfigPlace& place);
// resolve_model with places for its messages. tokenizer_vocab 0: not known yet, vocab_size stays as
// it is.
ModelConfig resolve_model_at(const Config& config, int64_t tokenizer_vocab,
                             const ConfigPlace& place);

}  // namespace muster
