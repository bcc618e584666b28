// How a member reads an Assignment, which is the same for all who get it. Pure.
#pragma once

#include <string>

#include "common/protocol/muster.pb.h"

namespace muster {

struct Place {
  int index = -1;             // among the assignment's members; -1: not one of them
  int rank = -1;              // in the generation; -1: not in it
  std::string data_endpoint;  // of the data service of its node; empty: not known
};
Place place_of(const std::string& member_id, const proto::Assignment& assignment);

}  // namespace muster
