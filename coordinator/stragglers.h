// Workers that compute slower than the others, step after step. What a worker waits for others is
// not its own slowness: a step counts without its waits for communication. Pure.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace muster {

struct StragglerOptions {
  double factor = 2.0;  // times the median of the others; 0: nobody is a straggler
  int64_t steps = 20;   // in a row
};

// What one worker reported of one step, seconds.
struct StepTimes {
  double step_s = 0.0;
  double wait_s = 0.0;  // for communication
  double own_s() const { return step_s - wait_s; }
};

struct Straggler {
  std::string member_id;
  double own_s = 0.0;
  double median_s = 0.0;  // of the others
};

class Stragglers {
 public:
  explicit Stragglers(const StragglerOptions& options) : options_(options) {}

  // A generation of so many workers begins; who was slow before is no longer counted.
  void begin(int world);
  // Returns who has been slow for the last `steps` steps and was not named in this generation yet.
  std::vector<Straggler> add(const std::string& member_id, int64_t step, const StepTimes& times);

  // Of the newest step that the worker reported; zeros when it has not.
  StepTimes last(const std::string& member_id) const;
  bool is_slow(const std::string& member_id) const;

 private:
  std::vector<Straggler> judge(const std::map<std::string, double>& own);

  StragglerOptions options_;
  int world_ = 0;
  std::map<int64_t, std::map<std::string, double>> pending_;  // step → member → own seconds
  std::map<std::string, StepTimes> last_;
  std::map<std::string, int64_t> slow_steps_;  // in a row
};

}  // namespace muster
