// State whose every element says where it belongs, for tests that move it about.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "worker/elastic/vault.h"

namespace muster::testing {

// Of element i of a unit's weights (kind 0) and moments (1, 2), after `step`: the value's bytes.
inline uint32_t element_of(int unit, int kind, int64_t i, int64_t step) {
  return static_cast<uint32_t>(i * 2654435761U) ^ static_cast<uint32_t>(unit * 97 + kind * 7 + 1) ^
         static_cast<uint32_t>(step << 20);
}

inline std::vector<TensorView> kinds_of(const ShardState& state) {
  return {state.weight, state.m, state.v};
}

inline void fill_state(const std::vector<ShardState>& state, int64_t step) {
  for (const ShardState& one : state) {
    int kind = 0;
    for (const TensorView& view : kinds_of(one)) {
      auto* bytes = static_cast<char*>(view.raw());
      const size_t size = size_of(view.dtype());
      for (int64_t i = 0; i < view.numel(); ++i) {
        const uint32_t value = element_of(one.unit, kind, one.range.begin + i, step);
        std::memcpy(bytes + i * static_cast<int64_t>(size), &value, size);
      }
      ++kind;
    }
  }
}

// How many elements are not what fill_state() writes.
inline int64_t wrong_elements(const std::vector<ShardState>& state, int64_t step) {
  int64_t wrong = 0;
  for (const ShardState& one : state) {
    int kind = 0;
    for (const TensorView& view : kinds_of(one)) {
      const auto* bytes = static_cast<const char*>(view.raw());
      const size_t size = size_of(view.dtype());
      for (int64_t i = 0; i < view.numel(); ++i) {
        const uint32_t value = element_of(one.unit, kind, one.range.begin + i, step);
        if (std::memcmp(bytes + i * static_cast<int64_t>(size), &value, size) != 0) ++wrong;
      }
      ++kind;
    }
  }
  return wrong;
}

// A piece in the vault, as of step id.step.
inline void keep_filled(Vault& vault, const PieceId& id) {
  const auto piece = vault.begin(id);
  fill_state(piece->state(), id.step);
  vault.keep(piece, {.updates = id.step, .tokens = id.step * 1000, .loss_mean = 1.5});
}

}  // namespace muster::testing
