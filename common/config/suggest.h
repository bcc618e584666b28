// Nearest names, for "did you mean …?".
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace muster {

// Insertions, deletions, substitutions and swaps of neighbours that turn a into b.
int edit_distance(std::string_view a, std::string_view b);
// The configuration key closest to `section`.`name` ("model.heads"); "" when none is close enough
// to be meant. A key of the right name in another section is close.
std::string nearest_config_key(std::string_view section, std::string_view name);
// The candidate closest to `word`, "" when none is close enough.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace muster
