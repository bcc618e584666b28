#include "kernels/cross_entropy/cross_entropy.h"
#include "kernels/cuda/gpu_testing.h"

namespace muster {
namespace {

using namespace testing;
using CrossEntropyGpuTest = GpuTest;

void check(DType dtype, int64_t tokens, int64_t vocab, int64_t width, int64_t workspace) {
  SCOPED_TRACE(Shape({tokens, vocab, width}).to_string() + name_of(dtype));
  Operand hidden = Operand::random({tokens, width}, dtype, 1);
  Operand weight = Operand::random({vocab, width}, dtype, 2, 0.5);
  std::vector<int32_t> ids;
  for (int64_t n = 0; n < tokens; ++n) {
    ids.push_back(n % 5 == 3 ? -1 : static_cast<int32_t>(n * 7919 % vocab));
  }
  Operand targets = Operand::ints(ids);
  CrossEntropyOptions options;
  options.gpu_workspace_bytes = workspace;
  // float64, but a sum of losses of the activations' precision.
  Operand loss = Operand::scalar(1.5);
  expect_matches_cpu({&hidden, &weight, &targets}, {&loss},
                     [&](const Stream& stream, const At& at) {
                       linear_cross_entropy_forward(stream, at(loss), at(hidden), at(weight),
                                                    at(targets), options);
                     });
  const double forward = loss.download()[0];
  Operand grad_hidden({tokens, width}, dtype);
  Operand grad_weight = Operand::random({vocab, width}, DType::kFloat32, 3);
  expect_matches_cpu({&hidden, &weight, &targets}, {&loss, &grad_hidden, &grad_weight},
                     [&](const Stream& stream, const At& at) {
                       linear_cross_entropy_train(stream, at(loss), at(grad_hidden),
                                                  at(grad_weight), at(hidden), at(weight),
                                                  at(targets), options);
                     });
  Operand written({vocab, width}, DType::kFloat32);
  options.accumulate_weight = false;
  expect_matches_cpu({&hidden, &weight, &targets}, {&loss, &grad_hidden, &written},
                     [&](const Stream& stream, const At& at) {
                       linear_cross_entropy_train(stream, at(loss), at(grad_hidden), at(written),
                                                  at(hidden), at(weight), at(targets), options);
                     });
  EXPECT_EQ(loss.download()[0], forward) << "the loss of training is the loss of the forward alone";
}

TEST_F(CrossEntropyGpuTest, MatchesTheCpu) {
  for (const DType dtype : activation_dtypes()) {
    check(dtype, 1, 1, 1, 1 << 20);
    check(dtype, 7, 11, 5, 1 << 20);
    check(dtype, 200, 1000, 64, 1 << 20);
    check(dtype, 150, 257, 33, 1 << 20);
  }
}

TEST_F(CrossEntropyGpuTest, LargeVocabulariesTakeClustersOrTwoReads) {
  check(DType::kBFloat16, 9, 40008, 16, 1 << 20);
  check(DType::kFloat32, 9, 40004, 16, 1 << 20);
  check(DType::kBFloat16, 4, 128256, 16, 1 << 20);
  check(DType::kBFloat16, 4, 151936, 16, 1 << 20);
  check(DType::kBFloat16, 3, 262152, 8, 4 << 20);
  // An odd vocabulary of several elements a thread, and both sides of the borders between kernels.
  for (const int64_t vocab : {50257, 8184, 8192, 65536, 65544}) {
    check(DType::kBFloat16, 9, vocab, 16, 1 << 20);
  }
}

TEST_F(CrossEntropyGpuTest, ChunksOfTokensAddUp) {
  for (const DType dtype : activation_dtypes()) {
    check(dtype, 301, 520, 48, 130 * 520 * 4);  // several chunks, the last one ragged
    check(dtype, 5, 64, 16, 1);                 // less than a row: a token at a time
  }
}

}  // namespace
}  // namespace muster
