#include "data/slot.h"

#include <cstring>
#include <vector>

#include "data/testing.h"

namespace muster {
namespace {

// Fills every array of a slot to its last element.
void fill(const Slot& slot, int64_t samples, int64_t length, uint64_t tag) {
  const int64_t tokens = samples * length;
  for (int64_t i = 0; i < tokens; ++i) {
    slot.tokens[i] = static_cast<int32_t>(i);
    slot.targets[i] = static_cast<int32_t>(i + 1);
    slot.positions[i] = 0;
    slot.cu_seqlens[i] = static_cast<int32_t>(i);
  }
  slot.cu_seqlens[tokens] = static_cast<int32_t>(tokens);
  for (int64_t i = 0; i < samples; ++i) slot.ids[i] = 100 + i;
  *slot.header = {kSlotMagic, tag, samples, tokens, 1, tokens};
}

TEST(Slot, ArraysAreAlignedApartAndInsideTheSlot) {
  for (const auto& [micro_batch, length] : {std::pair{1, 1}, {3, 17}, {8, 256}, {5, 1000}}) {
    const SlotLayout layout(micro_batch, length);
    EXPECT_EQ(layout.bytes() % 4096, 0);
    // Guarded on both sides, and full: had two arrays met, one would have overwritten the other.
    std::vector<char> memory(static_cast<size_t>(layout.bytes()) + 2 * 4096, 0x5a);
    char* begin = memory.data() + 4096 - reinterpret_cast<uintptr_t>(memory.data()) % 64;
    const Slot slot = layout.slot(begin);
    fill(slot, micro_batch, length, 9);
    for (const void* array : {static_cast<void*>(slot.tokens), static_cast<void*>(slot.targets),
                              static_cast<void*>(slot.positions),
                              static_cast<void*>(slot.cu_seqlens), static_cast<void*>(slot.ids)}) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(array) % 64, 0u);
    }
    const Batch batch = layout.batch(begin, 9);
    const int64_t tokens = int64_t{micro_batch} * length;
    EXPECT_EQ(batch.samples, micro_batch);
    EXPECT_EQ(batch.sequence_length, length);
    EXPECT_EQ(batch.tokens.numel(), tokens);
    EXPECT_EQ(batch.targets.data<int32_t>()[tokens - 1], tokens);
    EXPECT_EQ(batch.positions.numel(), tokens);
    EXPECT_EQ(batch.cu_seqlens.numel(), tokens + 1);
    EXPECT_EQ(batch.cu_seqlens.data<int32_t>()[tokens], tokens);
    EXPECT_EQ(batch.target_tokens, tokens);
    EXPECT_EQ(batch.max_segment, 1);
    EXPECT_EQ(batch.ids.back(), 100 + micro_batch - 1);
    for (char* guard : {begin - 1, begin + layout.bytes()}) EXPECT_EQ(*guard, 0x5a);
  }
}

TEST(Slot, RefusesWhatWasNotWrittenForThisRequest) {
  const SlotLayout layout(2, 4);
  alignas(64) static char memory[8192] = {};
  ASSERT_LE(layout.bytes(), 8192);
  const auto refused = [&](uint64_t tag) {
    return error_of<PeerError>([&] { layout.batch(memory, tag); });
  };
  EXPECT_THAT(refused(0), testing::HasSubstr("another batch")) << "never written";
  const Slot slot = layout.slot(memory);
  fill(slot, 2, 4, 7);
  EXPECT_EQ(layout.batch(memory, 7).samples, 2);
  EXPECT_THAT(refused(8), testing::HasSubstr("tag 7, expected 8"));
  slot.header->samples = 3;
  EXPECT_THAT(refused(7), testing::HasSubstr("another batch"));
  slot.header->samples = 2;
  slot.header->segments = 9;
  EXPECT_THAT(refused(7), testing::HasSubstr("another batch"));
}

}  // namespace
}  // namespace muster
