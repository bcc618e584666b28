// The names inside a run directory, for all who read or write it.
#pragma once

#include <cstdint>
#include <string>

namespace muster {

struct RunDir {
  std::string root;

  std::string config() const { return root + "/config.toml"; }
  std::string journal() const { return root + "/journal.sqlite"; }
  std::string metrics() const { return root + "/metrics.jsonl"; }
  std::string events() const { return root + "/events.jsonl"; }
  std::string samples() const { return root + "/samples.jsonl"; }  // metrics.debug_samples
  std::string run_key() const { return root + "/run.key"; }
  std::string lock() const { return root + "/lock"; }
  // Where the coordinator listens; there only while it runs.
  std::string endpoint() const { return root + "/coordinator.endpoint"; }
  // A random text, new with each coordinator: who reads it there shares the directory.
  std::string token() const { return root + "/coordinator.token"; }
  std::string logs() const { return root + "/logs"; }
  std::string checkpoints() const { return root + "/checkpoints"; }
  // step-00000100: a whole checkpoint. Its partial twin is what workers write and the coordinator
  // renames.
  std::string checkpoint(int64_t step) const { return checkpoints() + "/" + checkpoint_name(step); }
  std::string partial_checkpoint(int64_t step) const {
    return checkpoints() + "/" + kPartialPrefix + checkpoint_name(step);
  }
  // What workers of a generation that leave without a coordinator put there, until one commits it.
  std::string left_behind(int64_t step, uint64_t generation) const {
    return checkpoints() + "/" + kPartialPrefix + "left-" + std::to_string(generation) + "-" +
           checkpoint_name(step);
  }
  // Begins the names in checkpoints() of all that is no whole checkpoint.
  static constexpr const char* kPartialPrefix = ".partial-";
  static std::string checkpoint_name(int64_t step) {
    const std::string digits = std::to_string(step);
    return "step-" + std::string(digits.size() < 8 ? 8 - digits.size() : 0, '0') + digits;
  }
};

}  // namespace muster
