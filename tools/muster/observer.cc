#include "tools/muster/observer.h"

#include <fmt/format.h>

#include <filesystem>

#include "common/error.h"
#include "common/files.h"
#include "common/run_dir.h"

namespace muster {
namespace {

namespace fs = std::filesystem;

std::string trimmed(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

// An address that listens everywhere is reached here by loopback.
std::string reachable_from_here(std::string endpoint) {
  for (const std::string everywhere : {"tcp://0.0.0.0:", "tcp://*:", "tcp://[::]:"}) {
    if (endpoint.starts_with(everywhere)) {
      return "tcp://127.0.0.1:" + endpoint.substr(everywhere.size());
    }
  }
  return endpoint;
}

}  // namespace

RunAddress find_run(const std::string& run, const Security& given) {
  if (run.find("://") != std::string::npos) return {run, given};
  const RunDir dir{run};
  if (!fs::is_directory(run)) {
    throw UsageError(
        fmt::format("{}: neither a run directory nor an endpoint (tcp://HOST:PORT)", run));
  }
  if (!fs::exists(dir.endpoint())) {
    throw PeerError(fmt::format("{}: no coordinator runs there (no {})", run, dir.endpoint()));
  }
  const std::string endpoint = trimmed(read_file(dir.endpoint()));
  Security security = given;
  if (!security.enabled() && reaches_beyond_this_machine(endpoint)) {
    security.run_key = read_run_key(dir.run_key());
  }
  return {reachable_from_here(endpoint), security};
}

Observer::Observer(const RunAddress& address)
    : client_(std::make_unique<Client>(address.endpoint, address.security, "the coordinator")) {}

proto::Envelope Observer::call(proto::Envelope request, Deadline deadline) {
  request.set_request_id(next_request_++);
  return client_->call(std::move(request), deadline);
}

proto::Status Observer::status(Deadline deadline) {
  proto::Envelope envelope;
  envelope.mutable_status_request();
  const proto::Envelope reply = call(std::move(envelope), deadline);
  if (!reply.has_status())
    throw PeerError("the coordinator answered StatusRequest with something else");
  return reply.status();
}

void Observer::stop(const std::string& reason, bool immediately, Deadline deadline) {
  proto::Envelope envelope;
  envelope.mutable_stop_request()->set_reason(reason);
  envelope.mutable_stop_request()->set_immediately(immediately);
  call(std::move(envelope), deadline);
}

std::string Observer::scale(int workers, Deadline deadline) {
  proto::Envelope envelope;
  envelope.mutable_scale_request()->set_workers(workers);
  return call(std::move(envelope), deadline).accepted().what();
}

std::string Observer::drain(const std::string& who, const std::string& reason, Deadline deadline) {
  proto::Envelope envelope;
  envelope.mutable_drain_request()->set_who(who);
  envelope.mutable_drain_request()->set_reason(reason);
  return call(std::move(envelope), deadline).accepted().what();
}

void Observer::ask_status(Deadline deadline) {
  proto::Envelope envelope;
  envelope.set_request_id(next_request_++);
  envelope.mutable_status_request();
  client_->send(std::move(envelope), deadline);
}

void Observer::ask_stop(const std::string& reason, bool immediately, Deadline deadline) {
  proto::Envelope envelope;
  envelope.set_request_id(next_request_++);
  envelope.mutable_stop_request()->set_reason(reason);
  envelope.mutable_stop_request()->set_immediately(immediately);
  client_->send(std::move(envelope), deadline);
}

std::optional<proto::Status> Observer::receive(Deadline deadline, Waker* waker) {
  while (true) {
    auto envelope = client_->receive(deadline, waker);
    if (!envelope) return std::nullopt;
    if (envelope->has_status()) return std::move(*envelope->mutable_status());
  }
}

void ask_run(const std::string& run, const Security& given,
             const std::function<void(Observer&)>& ask) {
  Observer observer(find_run(run, given));
  try {
    ask(observer);
  } catch (const TimeoutError& error) {
    throw TimeoutError(
        fmt::format("{}: {}; if the run was killed, the next `muster train` goes on from "
                    "its newest checkpoint",
                    run, error.what()));
  }
}

}  // namespace muster
