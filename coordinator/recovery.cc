#include "coordinator/recovery.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace muster {

namespace {

// Holders by part, each part's in order of the pieces.
using Parts = std::map<int, std::vector<std::string>>;

std::vector<std::string> choose_holders(const Parts& parts) {
  std::map<std::string, int> given;
  std::vector<std::string> holders;
  for (const auto& [part, candidates] : parts) {
    const auto chosen = std::min_element(
        candidates.begin(), candidates.end(),
        [&](const std::string& a, const std::string& b) { return given[a] < given[b]; });
    ++given[*chosen];
    holders.push_back(*chosen);
  }
  return holders;
}

}  // namespace

std::optional<Recovery> choose_recovery(const std::vector<HeldPiece>& pieces) {
  std::map<std::tuple<int64_t, uint64_t, int>, Parts> states;  // step, generation, world
  for (const HeldPiece& piece : pieces) {
    if (piece.world < 1 || piece.part < 0 || piece.part >= piece.world) continue;
    states[{piece.step, piece.generation, piece.world}][piece.part].push_back(piece.member_id);
  }
  for (auto state = states.rbegin(); state != states.rend(); ++state) {
    const auto& [step, generation, world] = state->first;
    if (static_cast<int>(state->second.size()) < world) continue;
    return Recovery{generation, step, choose_holders(state->second)};
  }
  return std::nullopt;
}

}  // namespace muster
