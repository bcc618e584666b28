#include "common/protocol/assignment.h"

namespace muster {

Place place_of(const std::string& member_id, const proto::Assignment& assignment) {
  Place place;
  for (int i = 0; i < assignment.members_size(); ++i) {
    const proto::Assignment::Member& member = assignment.members(i);
    if (member.member_id() != member_id) continue;
    place.index = i;
    if (i < assignment.world_size()) place.rank = i;
    if (member.node() >= 0 && member.node() < assignment.nodes_size()) {
      place.data_endpoint = assignment.nodes(member.node()).data_endpoint();
    }
    break;
  }
  return place;
}

}  // namespace muster
