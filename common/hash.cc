#include "common/hash.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>
#include <xxhash.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "common/check.h"
#include "common/error.h"
#include "common/files.h"

namespace muster {

struct Xxh3::State {
  XXH3_state_t* xxh = XXH3_createState();
  ~State() { XXH3_freeState(xxh); }
};

uint64_t xxh3(const void* data, size_t bytes) {
  return XXH3_64bits(data, bytes);
}

uint64_t xxh3_file(const std::string& path) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  constexpr size_t kPiece = 1 << 20;
  std::vector<char> piece(kPiece);
  Xxh3 hash;
  while (true) {
    const ssize_t got = fd.valid() ? ::read(fd.get(), piece.data(), piece.size()) : -1;
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw IoError(fmt::format("{}: cannot read: {}", path, std::strerror(errno)));
    if (got == 0) return hash.digest();
    hash.update(piece.data(), static_cast<size_t>(got));
  }
}

std::string to_hex(uint64_t hash) {
  return fmt::format("{:016x}", hash);
}

Xxh3::Xxh3() : state_(std::make_unique<State>()) {
  MUSTER_CHECK(state_->xxh != nullptr && XXH3_64bits_reset(state_->xxh) == XXH_OK);
}
Xxh3::~Xxh3() = default;
Xxh3::Xxh3(Xxh3&&) noexcept = default;
Xxh3& Xxh3::operator=(Xxh3&&) noexcept = default;

void Xxh3::update(const void* data, size_t bytes) {
  MUSTER_CHECK(XXH3_64bits_update(state_->xxh, data, bytes) == XXH_OK);
}

uint64_t Xxh3::digest() const {
  return XXH3_64bits_digest(state_->xxh);
}

}  // namespace muster
