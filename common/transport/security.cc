#include <fmt/format.h>
#include <sys/stat.h>
#include <zmq.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "common/check.h"
#include "common/error.h"
#include "common/transport/keys.h"
#include "common/transport/transport.h"

namespace muster {

namespace {
constexpr size_t kKeyChars = 40;  // Z85 of 32 bytes
}  // namespace

std::string generate_run_key() {
  std::array<char, kKeyChars + 1> public_key{};
  std::array<char, kKeyChars + 1> secret_key{};
  if (zmq_curve_keypair(public_key.data(), secret_key.data()) != 0) {
    throw Error(fmt::format("cannot make a run key: {} (libzmq must be built with CURVE)",
                            zmq_strerror(zmq_errno())));
  }
  return secret_key.data();
}

std::string read_run_key(const std::string& path) {
  struct stat info {};
  if (stat(path.c_str(), &info) != 0) {
    throw IoError(fmt::format("{}: cannot read the run key: {}", path, std::strerror(errno)));
  }
  if (!S_ISREG(info.st_mode)) throw IoError(fmt::format("{}: the run key is not a file", path));
  if ((info.st_mode & 077) != 0) {
    throw IoError(fmt::format(
        "{}: the run key can be read by others (mode {:o}): chmod 600 it, or make a new one", path,
        info.st_mode & 0777));
  }
  std::ifstream file(path);
  std::string key;
  if (!(file >> key)) {
    throw IoError(fmt::format("{}: cannot read the run key: {}", path,
                              errno != 0 ? std::strerror(errno) : "the file is empty"));
  }
  try {
    transport::public_key_of(key);
  } catch (const ConfigError& e) {
    throw ConfigError(fmt::format("{}: {}", path, e.what()));
  }
  return key;
}

bool reaches_beyond_this_machine(const std::string& endpoint) {
  const std::string tcp = "tcp://";
  if (endpoint.compare(0, tcp.size(), tcp) != 0) return false;
  const std::string host = endpoint.substr(tcp.size(), endpoint.rfind(':') - tcp.size());
  return host.compare(0, 4, "127.") != 0 && host != "localhost" && host != "[::1]" && host != "lo";
}

namespace transport {

std::string public_key_of(const std::string& run_key) {
  std::array<char, kKeyChars + 1> public_key{};
  if (run_key.size() != kKeyChars || zmq_curve_public(public_key.data(), run_key.c_str()) != 0) {
    throw ConfigError(fmt::format("the run key is not valid: expected {} characters of Z85, got {}",
                                  kKeyChars, run_key.size()));
  }
  return public_key.data();
}

}  // namespace transport
}  // namespace muster
