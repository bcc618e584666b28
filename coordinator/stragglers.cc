#include "coordinator/stragglers.h"

#include <algorithm>

namespace muster {

namespace {

// Shorter steps differ by chance.
constexpr double kShortest = 0.002;  // seconds

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

void Stragglers::begin(int world) {
  world_ = world;
  pending_.clear();
  last_.clear();
  slow_steps_.clear();
}

std::vector<Straggler> Stragglers::add(const std::string& member_id, int64_t step,
                                       const StepTimes& times) {
  last_[member_id] = times;
  if (options_.factor <= 0 || world_ < 2) return {};
  auto& own = pending_[step];
  own[member_id] = times.own_s();
  if (static_cast<int>(own.size()) < world_) return {};
  std::vector<Straggler> news = judge(own);
  pending_.erase(pending_.begin(), pending_.upper_bound(step));
  return news;
}

std::vector<Straggler> Stragglers::judge(const std::map<std::string, double>& own) {
  std::vector<double> all;
  all.reserve(own.size());
  for (const auto& [id, seconds] : own) all.push_back(seconds);
  // Of two the faster one is the other; of many, one more or less does not move the median.
  const double usual = all.size() == 2 ? std::min(all[0], all[1]) : median(std::move(all));
  std::vector<Straggler> news;
  for (const auto& [id, seconds] : own) {
    int64_t& row = slow_steps_[id];
    row = seconds > options_.factor * usual && seconds > kShortest ? row + 1 : 0;
    if (row == options_.steps) news.push_back({id, seconds, usual});
  }
  return news;
}

StepTimes Stragglers::last(const std::string& member_id) const {
  const auto found = last_.find(member_id);
  return found == last_.end() ? StepTimes{} : found->second;
}

bool Stragglers::is_slow(const std::string& member_id) const {
  const auto found = slow_steps_.find(member_id);
  return found != slow_steps_.end() && found->second >= options_.steps;
}

}  // namespace muster
