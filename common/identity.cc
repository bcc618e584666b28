#include "common/identity.h"

#include <fmt/format.h>
#include <sys/random.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "common/error.h"

namespace muster {

std::string random_id() {
  std::array<uint64_t, 2> words{};
  // Requests of up to 256 bytes are neither cut short nor interrupted.
  if (getrandom(words.data(), sizeof(words), 0) != static_cast<ssize_t>(sizeof(words))) {
    throw IoError(fmt::format("getrandom: {}", std::strerror(errno)));
  }
  return fmt::format("{:016x}{:016x}", words[0], words[1]);
}

std::string host_name() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) {
    throw IoError(fmt::format("gethostname: {}", std::strerror(errno)));
  }
  return name.data();
}

}  // namespace muster
