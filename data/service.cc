#include "data/service.h"

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "common/config/config.h"
#include "common/error.h"
#include "common/logging.h"
#include "common/protocol/heartbeat.h"
#include "common/signals.h"
#include "data/batch_server.h"
#include "data/dataset.h"

namespace muster {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr Seconds kSendPatience{5};
constexpr int kFilesInReport = 20;

std::string random_member_id() {
  std::random_device random;
  return fmt::format("data-{:08x}{:08x}", random(), random());
}

std::string host_name() {
  char name[256] = "";
  ::gethostname(name, sizeof(name) - 1);
  return name;
}

// "path: why" of the first of them.
void add_files(const std::vector<SkippedFile>& files,
               google::protobuf::RepeatedPtrField<std::string>* list) {
  for (const SkippedFile& file : files) {
    if (list->size() == kFilesInReport) break;
    list->Add(file.path + ": " + file.why);
  }
}

proto::DatasetReport report_of(const Dataset& dataset) {
  proto::DatasetReport report;
  report.set_fingerprint(dataset.fingerprint());
  report.set_train_samples(dataset.samples(Split::kTrain));
  report.set_held_out_samples(dataset.samples(Split::kHeldOut));
  report.set_documents(static_cast<int64_t>(dataset.index().documents.size()));
  report.set_tokens(dataset.tokens());
  report.set_bytes(dataset.index().text_bytes);
  report.set_vocab_size(dataset.vocab_size());
  report.set_skipped_count(static_cast<int64_t>(dataset.index().skipped.size()));
  add_files(dataset.index().skipped, report.mutable_skipped());
  report.set_partly_used_count(static_cast<int64_t>(dataset.index().partly_used.size()));
  add_files(dataset.index().partly_used, report.mutable_partly_used());
  return report;
}

// The thread that scans and then serves the workers. It hands over one report, or one failure.
class ServingThread {
 public:
  // `changed` is woken when there is something to take.
  ServingThread(const Config& config, const Security& security, Waker& changed)
      : changed_(changed), thread_([this, config, security](const std::stop_token& stop) {
          try {
            serve(config, security, stop);
          } catch (...) {
            const std::lock_guard lock(mutex_);
            failure_ = std::current_exception();
          }
          open_rings_ = 0;
          changed_.wake();
        }) {}

  std::optional<proto::DatasetReport> take_report() {
    const std::lock_guard lock(mutex_);
    return std::exchange(report_, std::nullopt);
  }
  std::exception_ptr failure() {
    const std::lock_guard lock(mutex_);
    return failure_;
  }
  int open_rings() const { return open_rings_; }

 private:
  void serve(const Config& config, const Security& security, const std::stop_token& stop) {
    const auto start = std::chrono::steady_clock::now();
    const DatasetOptions options = dataset_options(config);
    Dataset dataset(options, stop);
    BatchServer server(dataset, security, options.threads);
    proto::DatasetReport report = report_of(dataset);
    report.set_endpoint(server.endpoint());
    spdlog::info(
        "{} documents, {} tokens, {} + {} samples, {} files read, {} from the cache, {:.3f} s",
        report.documents(), report.tokens(), report.train_samples(), report.held_out_samples(),
        dataset.index().files_read, dataset.index().files_cached,
        Seconds(std::chrono::steady_clock::now() - start).count());
    for (const std::string& file : report.skipped()) spdlog::warn("skipped: {}", file);
    for (const std::string& file : report.partly_used()) spdlog::warn("partly used: {}", file);
    {
      const std::lock_guard lock(mutex_);
      report_ = std::move(report);
    }
    changed_.wake();
    server.run(stop, [this](int rings) {
      open_rings_ = rings;
      changed_.wake();
    });
  }

  Waker& changed_;
  std::atomic<int> open_rings_{0};
  std::mutex mutex_;  // guards report_ and failure_
  std::optional<proto::DatasetReport> report_;
  std::exception_ptr failure_;
  std::jthread thread_;  // last: stops and joins before the rest goes
};

// The service's line to the coordinator; runs on the caller's thread.
class Service {
 public:
  explicit Service(const DataServiceOptions& options)
      : options_(options), coordinator_(options.coordinator, options.security, "the coordinator") {
    if (options.handle_signals) signals_.emplace(waker_);
  }

  int run() {
    if (!join()) return 0;
    while (true) {
      keep_heartbeats();
      if (!receive()) return 0;
      if (auto report = serving_->take_report()) send_report(*report);
      if (const auto failure = serving_->failure()) give_up(failure);
      if (signalled() && may_leave()) return 0;
    }
  }

 private:
  void say_hello() {
    proto::Envelope envelope;
    proto::Hello& hello = *envelope.mutable_hello();
    hello.set_role(proto::ROLE_DATA);
    hello.set_member_id(member_id_);
    hello.set_node_id(options_.node_id);
    hello.set_host(host_name());
    hello.set_pid(::getpid());
    coordinator_.send(std::move(envelope), Deadline::after(kSendPatience));
  }

  // False when a signal came first.
  bool join() {
    say_hello();
    // Not call(): a signal must end this wait.
    const Deadline deadline = Deadline::after(Seconds(options_.connect_timeout_s));
    std::optional<proto::Envelope> reply;
    do {
      if (signalled()) return false;
      if (deadline.passed()) {
        throw TimeoutError(
            fmt::format("the coordinator at {} did not answer in {} s: is it running?",
                        options_.coordinator, options_.connect_timeout_s));
      }
      waker_.clear();
      reply = coordinator_.receive(deadline, &waker_);
    } while (!reply || !reply->has_welcome());
    const proto::Welcome& welcome = reply->welcome();
    config_ = parse_config(welcome.config_toml(), "the coordinator's config");
    heartbeat_ =
        Seconds(welcome.heartbeat_s() > 0 ? welcome.heartbeat_s() : config_.elastic.heartbeat_s);
    patience_ = Seconds(patience_s(welcome, heartbeat_.count()));
    silent_since_ = Deadline::Clock::now();
    serving_.emplace(config_, options_.security, waker_);
    return true;
  }

  void keep_heartbeats() {
    if (!next_heartbeat_.passed()) return;
    next_heartbeat_ = Deadline::after(heartbeat_);
    proto::Envelope envelope;
    envelope.mutable_heartbeat();
    coordinator_.send(std::move(envelope), Deadline::after(kSendPatience));
  }

  // Waits for a message, a report, a signal or the next heartbeat. False once the run ends.
  bool receive() {
    const auto envelope = coordinator_.receive(next_heartbeat_, &waker_);
    waker_.clear();
    if (envelope) {
      silent_since_ = Deadline::Clock::now();
      if (envelope->has_stop()) {
        spdlog::info("the coordinator ends the run: {}", envelope->stop().reason());
        return false;
      }
      // To a coordinator that was started anew.
      if (envelope->has_hello_again()) {
        say_hello();
        if (const auto report = reported_) send_report(*report);
      }
      return true;
    }
    const Seconds silence = Deadline::Clock::now() - silent_since_;
    if (silence > patience_) {
      throw TimeoutError(
          fmt::format("the coordinator at {} has been silent for {:.1f} s: it is gone",
                      options_.coordinator, silence.count()));
    }
    return true;
  }

  void send_report(const proto::DatasetReport& report) {
    reported_ = report;
    proto::Envelope envelope;
    *envelope.mutable_dataset_report() = report;
    coordinator_.send(std::move(envelope), Deadline::after(kSendPatience));
  }

  // The data cannot be served (any more): the coordinator hears why, and ends the run.
  [[noreturn]] void give_up(const std::exception_ptr& failure) {
    try {
      std::rethrow_exception(failure);
    } catch (const std::exception& error) {
      proto::DatasetReport report;
      report.set_error(error.what());
      try {
        send_report(report);
        const Deadline deadline = Deadline::after(Seconds(config_.elastic.shutdown_timeout_s));
        do {
          keep_heartbeats();
        } while (receive() && !deadline.passed() && !signalled());
      } catch (const PeerError&) {
        // The coordinator is gone too; what made us give up is the better message.
      }
      throw;
    }
  }

  bool signalled() const {
    return signals_ && signals_->terminations() + signals_->interrupts() > 0;
  }

  // After a signal: whether nobody needs us. A signal that reaches all processes of a job at once
  // must not take the data away from workers that still finish their step.
  bool may_leave() {
    if (serving_->open_rings() == 0) return true;
    if (!leave_by_) {
      leave_by_ = Deadline::after(Seconds(config_.elastic.shutdown_timeout_s));
      spdlog::info("asked to go: waiting for {} workers to leave first", serving_->open_rings());
      proto::Envelope envelope;
      envelope.mutable_leaving()->set_reason("the data service was asked to go");
      coordinator_.send(std::move(envelope), Deadline::after(kSendPatience));
    }
    return leave_by_->passed();
  }

  const DataServiceOptions& options_;
  Waker waker_;
  std::optional<SignalWatch> signals_;
  Client coordinator_;
  Config config_;
  const std::string member_id_ =
      options_.member_id.empty() ? random_member_id() : options_.member_id;
  Seconds heartbeat_{1};
  Seconds patience_{};  // set by join()
  std::optional<proto::DatasetReport> reported_;
  Deadline next_heartbeat_ = Deadline::now();
  Deadline::Clock::time_point silent_since_;
  std::optional<Deadline> leave_by_;
  std::optional<ServingThread> serving_;  // last: ends before what it wakes
};

}  // namespace

int run_data_service(const DataServiceOptions& options) {
  return Service(options).run();
}

}  // namespace muster
