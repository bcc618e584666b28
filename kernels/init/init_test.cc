#include "kernels/init/init.h"

#include "kernels/testing.h"

namespace muster {
namespace {

using namespace testing;

// An element is a function of its index, wherever its shard begins and whoever computes it.
TEST(InitTest, NormalIsTheGeneratorsValue) {
  const CounterRng rng(11, RandomPurpose::kInit, 77);
  const Tensor whole = poisoned({40001});
  fill_normal(Stream::cpu(), whole, 11, 77, 5, 0.02);
  for (int64_t i = 0; i < whole.numel(); ++i) {
    ASSERT_EQ(whole.data<float>()[i], static_cast<float>(0.02 * rng.normal(5 + i))) << i;
  }
  const ThreadCount count(1);
  const Tensor part = poisoned({33});
  fill_normal(Stream::cpu(), part, 11, 77, 5 + 20000, 0.02);
  expect_same_bits(part, whole.view().slice(20000, 20033));
}

TEST(InitTest, FillsWithAValue) {
  const Tensor out = poisoned({20003});
  fill_value(Stream::cpu(), out, 1.5f);
  EXPECT_EQ(to_vector<float>(out), std::vector<float>(20003, 1.5f));
  fill_value(Stream::cpu(), out.view().slice(0, 0), 2.0f);
  EXPECT_EQ(out.data<float>()[0], 1.5f);
}

}  // namespace
}  // namespace muster
