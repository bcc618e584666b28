// The run directory while a coordinator is at work in it: its lock, its endpoint file, its run key.
#pragma once

#include <string>

#include "common/files.h"
#include "common/run_dir.h"
#include "common/transport/transport.h"

namespace muster {

// Held from the start to the end of a coordinator; the kernel lets go of it however the process
// ends.
class RunLock {
 public:
  // Makes the directory. Throws PeerError when another coordinator holds it and keeps it for a
  // second, naming its endpoint; IoError otherwise.
  explicit RunLock(const RunDir& run);
  // Whether the file that is locked is still the one in the run directory: if not, somebody has
  // removed, moved or replaced the directory, and what is written there is lost.
  bool in_place() const;

 private:
  std::string path_;
  Fd file_;
};

// RUN_DIR/coordinator.endpoint, one line, while it lives.
class EndpointFile {
 public:
  // Throws IoError.
  EndpointFile(const RunDir& run, const std::string& endpoint);
  ~EndpointFile();
  EndpointFile(const EndpointFile&) = delete;
  EndpointFile& operator=(const EndpointFile&) = delete;

 private:
  std::string path_;
};

// RUN_DIR/coordinator.token, by which others can tell that they see the coordinator's run directory
// and not one of their own; there while the coordinator lives.
class TokenFile {
 public:
  // Throws IoError.
  explicit TokenFile(const RunDir& run);
  ~TokenFile();
  TokenFile(const TokenFile&) = delete;
  TokenFile& operator=(const TokenFile&) = delete;
  const std::string& token() const { return token_; }

 private:
  std::string path_;
  std::string token_;
};

// The key for listening on `listen`: the given one; else where others can reach it that of the
// run's key file, which is made (0600) if missing; else none. A given key that others need is
// written to the key file.
Security run_security(const RunDir& run, const std::string& listen, const Security& given);

// What others connect to for a socket bound to `bound`: a wildcard address becomes this machine's
// own.
std::string reachable_endpoint(const std::string& bound);

}  // namespace muster
