// The key-value store over which the workers of a generation find each other. Keys are
// "GENERATION/…". Pure: who has to be answered is returned.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace muster {

class RendezvousStore {
 public:
  // Keeps the value and returns who was waiting for it. Keys of other generations are dropped: a
  // straggler's.
  std::vector<std::string> set(const std::string& key, const std::string& value);
  // The value, or nothing: then `peer` is remembered until set() or the generation's end.
  std::optional<std::string> get(const std::string& key, const std::string& peer);
  // Forgets all that came before.
  void begin_generation(uint64_t generation);

 private:
  std::string prefix_;
  std::map<std::string, std::string> values_;
  std::map<std::string, std::vector<std::string>> waiting_;
};

}  // namespace muster
