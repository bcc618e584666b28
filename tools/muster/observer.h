// Looking at a running run and asking it to stop, from outside.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "common/transport/transport.h"

namespace muster {

// Where a run can be reached.
struct RunAddress {
  std::string endpoint;
  Security security;
};
// `run`: an endpoint (tcp://…, ipc://…), or a run directory whose coordinator runs. `given` is the
// run key of the command line or environment; without one, a run that listens beyond this machine
// has its key in the run directory. Throws UsageError or PeerError that says that nobody is there.
RunAddress find_run(const std::string& run, const Security& given);

class Observer {
 public:
  explicit Observer(const RunAddress& address);
  // Throws TimeoutError naming the endpoint, PeerError when refused.
  proto::Status status(Deadline deadline);
  void stop(const std::string& reason, bool immediately, Deadline deadline);

  // The same without waiting: the answers come from receive().
  void ask_status(Deadline deadline);
  void ask_stop(const std::string& reason, bool immediately, Deadline deadline);
  // The next status; nullopt at the deadline or when `waker` fires.
  std::optional<proto::Status> receive(Deadline deadline, Waker* waker);

 private:
  std::unique_ptr<Client> client_;
  uint64_t next_request_ = 1;
};

}  // namespace muster
