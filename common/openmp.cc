#include "common/openmp.h"

#include <cstdlib>

namespace muster {

std::map<std::string, std::string> openmp_environment() {
  const bool set_by_user =
      std::getenv("OMP_WAIT_POLICY") != nullptr || std::getenv("GOMP_SPINCOUNT") != nullptr;
  if (set_by_user) return {};
  return {{"GOMP_SPINCOUNT", "1000"}};
}

}  // namespace muster
