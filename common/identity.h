// Who a process is, to others.
#pragma once

#include <string>

namespace muster {

// 32 random hex digits from the system's entropy: member ids, abstract socket names.
std::string random_id();
// This machine's name.
std::string host_name();

}  // namespace muster
