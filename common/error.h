// The families of failure that Muster expects and handles. Every message names the file, key or
// peer and says what to do about it. A broken invariant is not an Error: it is a CHECK (check.h).
#pragma once

#include <stdexcept>
#include <string>

namespace muster {

// Base of everything that a command reports to its user. `exit_code` is what the process returns.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, int exit_code = 1)
      : std::runtime_error(message), exit_code_(exit_code) {}
  int exit_code() const { return exit_code_; }

 private:
  int exit_code_;
};

// Bad command line. Exit code 2.
class UsageError : public Error {
 public:
  explicit UsageError(const std::string& message) : Error(message, 2) {}
};

// Bad configuration: unknown key, wrong type, out of range, impossible combination. Exit code 2.
class ConfigError : public Error {
 public:
  explicit ConfigError(const std::string& message) : Error(message, 2) {}
};

// A file that cannot be read or written; carries the path and errno's text in the message.
class IoError : public Error {
 public:
  using Error::Error;
};

// A dataset, shard or token file whose content is not what it should be.
class DataError : public Error {
 public:
  using Error::Error;
};

// A GPU that failed under its process, which cannot use it any more; another process may.
class DeviceError : public Error {
 public:
  using Error::Error;
};

// A checkpoint that is torn, missing a part, or of another model.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

// Another process is gone, refused us, or broke the protocol. Recoverable by whoever runs the
// generation.
class PeerError : public Error {
 public:
  using Error::Error;
};

// A wait ran past its deadline; the message says who or what was waited for.
class TimeoutError : public PeerError {
 public:
  using PeerError::PeerError;
};

}  // namespace muster
