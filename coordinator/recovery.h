// From which state a run goes on after a generation broke off: which pieces of it live in memory.
// Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace muster {

// A part of the training state that a live worker holds: its own or, as a mirror, another one's.
struct HeldPiece {
  std::string member_id;
  uint64_t generation = 0;  // whose layout it belongs to
  int world = 0;            // how many parts that layout has
  int part = 0;
  int64_t step = 0;
};

struct Recovery {
  uint64_t generation = 0;
  int64_t step = 0;
  std::vector<std::string> holders;  // member id by part; as many as the layout has parts
};

// The newest step of which every part of some layout is there; of equal steps the newest
// generation. A part that several hold comes from whoever has the fewest others to give. Nothing:
// some part is lost at every step.
std::optional<Recovery> choose_recovery(const std::vector<HeldPiece>& pieces);

}  // namespace muster
