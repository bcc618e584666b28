// Looking at a running run and steering it, from outside.
#pragma once

#include <functional>
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
  // These return what the coordinator says it will do; PeerError tells why it will not.
  std::string scale(int workers, Deadline deadline);
  std::string drain(const std::string& who, const std::string& reason, Deadline deadline);

  // The same without waiting: the answers come from receive().
  void ask_status(Deadline deadline);
  void ask_stop(const std::string& reason, bool immediately, Deadline deadline);
  // The next status; nullopt at the deadline or when `waker` fires.
  std::optional<proto::Status> receive(Deadline deadline, Waker* waker);

 private:
  proto::Envelope call(proto::Envelope request, Deadline deadline);

  std::unique_ptr<Client> client_;
  uint64_t next_request_ = 1;
};

// How long a command waits for the coordinator's answer.
inline constexpr std::chrono::seconds kAnswerPatience(5);
// Calls `ask` with an observer of `run`, see find_run. The TimeoutError of a coordinator that left
// its address and does not answer says what to do.
void ask_run(const std::string& run, const Security& given,
             const std::function<void(Observer&)>& ask);

}  // namespace muster
