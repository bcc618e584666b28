#include "kernels/attention/attention_choice.h"

#include <gtest/gtest.h>

#include <vector>

namespace muster {
namespace {

AttentionCall fastest() {
  return {.hopper = true, .options = {.scale = 0.125f}};
}

TEST(AttentionChoiceTest, NothingSpecialGoesToTheFastest) {
  AttentionCall call = fastest();
  for (const bool causal : {false, true}) {
    call.options.causal = causal;
    for (const int64_t width : {64, 128}) {
      call.width = width;
      EXPECT_EQ(choose_attention_kernels(call).kernels, AttentionKernels::kHopper);
      EXPECT_EQ(choose_attention_kernels(call).reason, nullptr);
    }
  }
}

TEST(AttentionChoiceTest, OtherGpusLackNothing) {
  AttentionCall call = fastest();
  call.hopper = false;
  call.options.window_left = 100;
  EXPECT_EQ(choose_attention_kernels(call).kernels, AttentionKernels::kMma);
  EXPECT_EQ(choose_attention_kernels(call).reason, nullptr);
}

TEST(AttentionChoiceTest, WhatHopperLacksGoesToMma) {
  std::vector<AttentionCall> calls(5, fastest());
  calls[0].options.window_left = 0;
  calls[1].options.window_right = 3;
  calls[2].dtype = DType::kFloat16;
  calls[3].width = 96;
  calls[4].width = 8;
  for (const AttentionCall& call : calls) {
    const AttentionChoice choice = choose_attention_kernels(call);
    EXPECT_EQ(choice.kernels, AttentionKernels::kMma);
    EXPECT_NE(choice.reason, nullptr);
    log_attention_choice(choice);
  }
}

TEST(AttentionChoiceTest, AllElseGoesToPortable) {
  std::vector<AttentionCall> calls(7, fastest());
  calls[0].options.logit_cap = 30.0f;
  calls[1].options.dropout = 0.1f;
  calls[2].dtype = DType::kFloat32;
  calls[3].width = 20;
  calls[4].width = 136;
  calls[5].options.scale = -0.1f;
  calls[6].aligned = false;
  for (AttentionCall& call : calls) {
    for (const bool hopper : {false, true}) {
      call.hopper = hopper;
      const AttentionChoice choice = choose_attention_kernels(call);
      EXPECT_EQ(choice.kernels, AttentionKernels::kPortable);
      EXPECT_NE(choice.reason, nullptr);
    }
  }
}

TEST(AttentionChoiceTest, AReasonIsLoggedOnce) {
  ::testing::internal::CaptureStdout();
  log_attention_choice({AttentionKernels::kPortable, "the test's reason"});
  log_attention_choice({AttentionKernels::kPortable, "the test's reason"});
  log_attention_choice({AttentionKernels::kHopper, nullptr});
  const std::string text = ::testing::internal::GetCapturedStdout();
  const size_t at = text.find("the test's reason takes the portable kernels");
  ASSERT_NE(at, std::string::npos) << text;
  EXPECT_EQ(text.find("the test's reason", at + 1), std::string::npos) << text;
  EXPECT_EQ(text.find("Hopper"), std::string::npos) << text;
}

}  // namespace
}  // namespace muster
