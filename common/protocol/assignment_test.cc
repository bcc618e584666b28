#include "common/protocol/assignment.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

TEST(PlaceOf, IsFoundByTheMembersId) {
  proto::Assignment assignment;
  assignment.set_world_size(2);
  for (const char* endpoint : {"ipc://@n", ""}) assignment.add_nodes()->set_data_endpoint(endpoint);
  const std::vector<std::pair<const char*, int>> members = {{"a", 1}, {"b", 0}, {"c", 0}};
  for (const auto& [id, node] : members) {
    assignment.add_members()->set_member_id(id);
    assignment.mutable_members()->rbegin()->set_node(node);
  }
  const Place b = place_of("b", assignment);
  EXPECT_EQ(b.index, 1);
  EXPECT_EQ(b.rank, 1);
  EXPECT_EQ(b.data_endpoint, "ipc://@n");
  EXPECT_EQ(place_of("a", assignment).data_endpoint, "") << "its data service is not there";
  const Place leaver = place_of("c", assignment);
  EXPECT_EQ(leaver.index, 2);
  EXPECT_EQ(leaver.rank, -1);
  EXPECT_EQ(place_of("d", assignment).index, -1);
  // What is not true to form is no reason to fall.
  assignment.mutable_members(1)->set_node(7);
  EXPECT_EQ(place_of("b", assignment).data_endpoint, "");
}

}  // namespace
}  // namespace muster
