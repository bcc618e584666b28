// Internal to common/transport.
#pragma once

#include <string>

namespace muster::transport {

// The Z85 public key that belongs to a run key. Throws ConfigError when `run_key` is not 40
// characters of Z85.
std::string public_key_of(const std::string& run_key);

}  // namespace muster::transport
