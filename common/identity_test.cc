#include "common/identity.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

TEST(Identity, IdsAreLongAndDiffer) {
  const std::string id = random_id();
  EXPECT_EQ(id.size(), 32U);
  EXPECT_EQ(id.find_first_not_of("0123456789abcdef"), std::string::npos);
  EXPECT_NE(id, random_id());
}

TEST(Identity, TheMachineHasAName) {
  EXPECT_FALSE(host_name().empty());
}

}  // namespace
}  // namespace muster
