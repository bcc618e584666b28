// How OpenMP's threads wait for one another.
#pragma once

#include <map>
#include <string>

namespace muster {

// What a process that computes must find in its environment when it is started: libgomp reads it
// when it is loaded. By default its threads spin for milliseconds, on cores that the data service,
// the collectives and other workers need: on a busy machine training was up to ten times slower.
// Empty where the user has set OMP_WAIT_POLICY or GOMP_SPINCOUNT, which stands.
std::map<std::string, std::string> openmp_environment();

}  // namespace muster
