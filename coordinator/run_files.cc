#include "coordinator/run_files.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>

#include "common/deadline.h"
#include "common/error.h"
#include "common/identity.h"
#include "common/logging.h"

namespace muster {

namespace {

// The first address of an interface that is up and not loopback; "127.0.0.1" on a machine without a
// network.
std::string own_address() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return "127.0.0.1";
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, freeifaddrs);
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != AF_INET ||
        (entry->ifa_flags & IFF_LOOPBACK) != 0 || (entry->ifa_flags & IFF_UP) == 0) {
      continue;
    }
    char text[INET_ADDRSTRLEN] = {};
    const auto* address = reinterpret_cast<const sockaddr_in*>(entry->ifa_addr);
    if (inet_ntop(AF_INET, &address->sin_addr, text, sizeof text) != nullptr) return text;
  }
  return "127.0.0.1";
}

void write_key_file(const std::string& path, const std::string& key) {
  // Never readable by others, not even for the moment before a chmod.
  Fd file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file.valid()) throw IoError(fmt::format("{}: {}", path, std::strerror(errno)));
  write_all(file.get(), key + "\n", path);
}

void remove_or_warn(const std::string& path) {
  if (unlink(path.c_str()) != 0) {
    spdlog::warn("{}: cannot be removed: {}", path, std::strerror(errno));
  }
}

std::string held_by_another(const RunDir& run) {
  std::string where;
  try {
    where = read_file(run.endpoint());
    while (!where.empty() && where.back() == '\n') where.pop_back();
  } catch (const IoError&) {
    where = "an endpoint it has not published yet";
  }
  return fmt::format(
      "{}: another coordinator is at work in this run directory, at {}: stop it (muster stop {}), "
      "or choose another run.dir",
      run.root, where, run.root);
}

}  // namespace

RunLock::RunLock(const RunDir& run) : path_(run.lock()) {
  make_dirs(run.root);
  file_.reset(open(run.lock().c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (!file_.valid()) throw IoError(fmt::format("{}: {}", run.lock(), std::strerror(errno)));
  // One that was killed a moment ago holds it until the kernel has taken that process apart.
  constexpr std::chrono::milliseconds kPatience(1000);
  constexpr std::chrono::milliseconds kInterval(20);
  const Deadline deadline = Deadline::after(kPatience);
  while (flock(file_.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) {
      throw IoError(fmt::format("{}: cannot be locked: {}", run.lock(), std::strerror(errno)));
    }
    if (deadline.passed()) throw PeerError(held_by_another(run));
    std::this_thread::sleep_for(kInterval);
  }
}

bool RunLock::in_place() const {
  struct stat mine {
  }, there{};
  if (stat(path_.c_str(), &there) != 0) return errno != ENOENT && errno != ENOTDIR;
  return fstat(file_.get(), &mine) != 0 ||
         (mine.st_ino == there.st_ino && mine.st_dev == there.st_dev);
}

EndpointFile::EndpointFile(const RunDir& run, const std::string& endpoint) : path_(run.endpoint()) {
  write_file_atomic(path_, endpoint + "\n");
}

EndpointFile::~EndpointFile() {
  remove_or_warn(path_);
}

TokenFile::TokenFile(const RunDir& run) : path_(run.token()), token_(random_id()) {
  write_file_atomic(path_, token_);
}

TokenFile::~TokenFile() {
  remove_or_warn(path_);
}

Security run_security(const RunDir& run, const std::string& listen, const Security& given) {
  if (!reaches_beyond_this_machine(listen)) return given;
  const bool has_file = access(run.run_key().c_str(), F_OK) == 0;
  if (!given.enabled()) {
    if (!has_file) write_key_file(run.run_key(), generate_run_key());
    return {read_run_key(run.run_key())};
  }
  if (has_file && read_run_key(run.run_key()) != given.run_key) {
    throw ConfigError(fmt::format(
        "{} holds another run key than this process was given (MUSTER_RUN_KEY): unset that, or "
        "remove the file",
        run.run_key()));
  }
  if (!has_file) write_key_file(run.run_key(), given.run_key);
  return given;
}

std::string reachable_endpoint(const std::string& bound) {
  const std::string wildcard = "tcp://0.0.0.0:";
  if (!bound.starts_with(wildcard)) return bound;
  return "tcp://" + own_address() + ":" + bound.substr(wildcard.size());
}

}  // namespace muster
