#include "common/config/suggest.h"

#include <algorithm>

#include "common/config/fields.h"

namespace muster {
namespace {

// A typo changes at most two letters of a short word, a third of a long one.
int tolerance(std::string_view word) {
  return std::max(2, static_cast<int>(word.size()) / 3);
}

}  // namespace

int edit_distance(std::string_view a, std::string_view b) {
  // Optimal string alignment: row i holds the distances of a's first i letters to b's prefixes.
  std::vector<int> before(b.size() + 1);
  std::vector<int> last(b.size() + 1);
  std::vector<int> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) last[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int substitution = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, substitution});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) row[j] = std::min(row[j], before[j - 2] + 1);
    }
    std::swap(before, last);
    std::swap(last, row);
  }
  return last[b.size()];
}

std::string nearest(std::string_view word, const std::vector<std::string>& candidates) {
  std::string best;
  int best_distance = tolerance(word) + 1;
  for (const std::string& candidate : candidates) {
    const int distance = edit_distance(word, candidate);
    // A word of which nothing is left is no suggestion ("x" for "lr").
    if (distance < best_distance && distance < static_cast<int>(candidate.size())) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

std::string nearest_config_key(std::string_view section, std::string_view name) {
  std::string best;
  int best_distance = tolerance(name) + 1;
  for (const ConfigField& field : config_fields()) {
    const int in_name = edit_distance(name, field.name);
    if (in_name >= static_cast<int>(field.name.size())) continue;
    // A wrong section costs one, however far: "train.lr" means "optimizer.lr".
    const int in_section = std::min(edit_distance(section, field.section), 1);
    if (in_name + in_section < best_distance) {
      best = field.key();
      best_distance = in_name + in_section;
    }
  }
  return best;
}

}  // namespace muster
