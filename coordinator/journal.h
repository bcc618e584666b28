// RUN_DIR/journal.sqlite: what happened in the run, for the next start and for people. SQLite in
// WAL mode: readers may look while the run goes on, and a crash leaves it whole.
//   run(key, value) · generations(generation, time, world_size, resume_step, reason, members)
//   steps(step, generation, time, tokens, loss) · checkpoints(step, generation, time) ·
//   events(time, kind, reason)
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

namespace muster {

class Journal {
 public:
  // Opens or creates. Throws IoError naming the file: not a database, of a newer format, disk full.
  explicit Journal(const std::string& path);
  ~Journal();

  // The last generation of earlier starts, 0 for none.
  uint64_t last_generation() const;
  int64_t last_step() const;

  // What set_run() wrote; "" if nothing.
  std::string run_value(const std::string& key) const;
  // Target tokens trained on up to each of the last `count` steps.
  std::map<int64_t, int64_t> token_history(int64_t count) const;

  // Each throws IoError when it cannot be written; then nothing of the call is.
  void set_run(const std::string& key, const std::string& value);
  // Forgets the steps after `resume_step`: they are done again.
  void begin_generation(uint64_t generation, int world_size, int64_t resume_step,
                        const std::string& reason, const std::string& members_json);
  void commit_step(int64_t step, uint64_t generation, int64_t tokens, double loss);
  void commit_checkpoint(int64_t step, uint64_t generation);
  void add_event(const std::string& kind, const std::string& reason);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace muster
