// XXH3, 64 bits: the checksum of shards, samples and documents. Not cryptographic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace muster {

uint64_t xxh3(const void* data, size_t bytes);
// Of a whole file, read in pieces. Throws IoError.
uint64_t xxh3_file(const std::string& path);
// Sixteen lower-case hex digits.
std::string to_hex(uint64_t hash);

// The same value as xxh3 over all bytes given to update, in order.
class Xxh3 {
 public:
  Xxh3();
  ~Xxh3();
  Xxh3(Xxh3&&) noexcept;
  Xxh3& operator=(Xxh3&&) noexcept;
  void update(const void* data, size_t bytes);
  uint64_t digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace muster
