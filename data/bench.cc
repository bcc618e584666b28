#include "data/bench.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>
#include <span>

#include "common/config/config.h"
#include "common/error.h"
#include "common/files.h"
#include "common/rng.h"
#include "common/transport/transport.h"
#include "data/client.h"
#include "data/slot.h"

namespace muster {
namespace {

using Clock = std::chrono::steady_clock;

// Long enough to index a large corpus.
constexpr std::chrono::minutes kPatience{30};
// So rare that the coordinator below may stay silent while it measures.
constexpr double kHeartbeatS = 24 * 3600;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// A service of its own coordinator, which does no more than a service needs.
class BenchedService {
 public:
  BenchedService(const Config& config, const DataBenchOptions& options)
      : server_(endpoint(), Security{}) {
    const Clock::time_point begin = Clock::now();
    service_ = options.start_service(server_.endpoint());
    const Deadline deadline = Deadline::after(kPatience);
    while (report_.endpoint().empty()) {
      const auto received = server_.receive(deadline);
      if (!received) throw TimeoutError("the data service did not report its dataset in time");
      peer_ = received->peer;
      if (received->envelope.has_hello()) welcome(config, received->envelope.request_id());
      if (received->envelope.has_dataset_report()) report_ = received->envelope.dataset_report();
      if (!report_.error().empty()) {
        stop();
        throw DataError(report_.error());
      }
    }
    start_s_ = seconds_since(begin);
  }
  ~BenchedService() { stop(); }
  BenchedService(const BenchedService&) = delete;
  BenchedService& operator=(const BenchedService&) = delete;

  const proto::DatasetReport& report() const { return report_; }
  double start_s() const { return start_s_; }

 private:
  static std::string endpoint() {
    std::random_device random;
    return "ipc://@muster-bench-" + std::to_string(random()) + "-" + std::to_string(random());
  }
  void welcome(const Config& config, uint64_t request_id) {
    proto::Envelope reply;
    reply.set_request_id(request_id);
    reply.mutable_welcome()->set_config_toml(to_toml(config));
    reply.mutable_welcome()->set_heartbeat_s(kHeartbeatS);
    server_.send(peer_, std::move(reply));
  }

  void stop() {
    proto::Envelope envelope;
    envelope.mutable_stop()->set_ok(true);
    server_.send(peer_, std::move(envelope));
  }

  std::shared_ptr<void> service_;  // ends after the message that tells it to
  Server server_;
  std::string peer_;
  proto::DatasetReport report_;
  double start_s_ = 0;
};

// Gets every sample of `ids` and reads its tokens. Seconds.
double one_pass(const BenchedService& service, const DataBenchOptions& options,
                std::span<const int64_t> ids) {
  DataClient client({service.report().endpoint(), "bench", options.slots, options.micro_batch,
                     options.sequence_length},
                    Security{}, Deadline::after(std::chrono::seconds(30)));
  const Clock::time_point begin = Clock::now();
  int64_t touched = 0;
  while (!ids.empty() || client.outstanding() > 0) {
    while (!ids.empty() && client.free_slots() > 0) {
      const size_t count = std::min(ids.size(), static_cast<size_t>(options.micro_batch));
      client.request(Split::kTrain, ids.first(count));
      ids = ids.subspan(count);
    }
    const Batch& batch = client.next(Deadline::after(kPatience));
    const auto* tokens = batch.tokens.data<int32_t>();
    touched = std::accumulate(tokens, tokens + batch.tokens.numel(), touched);
    client.release(batch);
  }
  MUSTER_CHECK(touched > 0);  // and so the reads cannot be optimised away
  return seconds_since(begin);
}

std::vector<int64_t> all_ids(int64_t samples) {
  std::vector<int64_t> ids(static_cast<size_t>(samples));
  std::iota(ids.begin(), ids.end(), int64_t{0});
  return ids;
}

std::vector<int64_t> shuffled(std::vector<int64_t> ids) {
  const CounterRng random(1, RandomPurpose::kSampleOrder, 0);
  for (size_t i = ids.size(); i > 1; --i) std::swap(ids[i - 1], ids[random.bits(i) % i]);
  return ids;
}

}  // namespace

DataBenchResult bench_data_service(const DataBenchOptions& options) {
  const TempDir cache("muster-bench");
  Config config;
  config.data.sources = options.sources;
  config.data.cache_dir = cache.path();
  config.data.held_out = 0;
  config.train.sequence_length = options.sequence_length;
  config.train.global_batch = 1;
  config.train.micro_batch = 1;

  DataBenchResult result;
  result.first_start_s = BenchedService(config, options).start_s();
  const BenchedService service(config, options);
  result.second_start_s = service.start_s();
  result.documents = service.report().documents();
  result.text_bytes = service.report().bytes();

  const std::vector<int64_t> ids = all_ids(service.report().train_samples());
  const auto text = static_cast<double>(ids.size()) * static_cast<double>(options.sequence_length);
  result.in_order_text_bytes_per_s = text / one_pass(service, options, ids);
  result.shuffled_text_bytes_per_s = text / one_pass(service, options, shuffled(ids));
  const SlotLayout layout(options.micro_batch, options.sequence_length);
  result.ring_bytes_per_text_byte =
      static_cast<double>(layout.bytes()) /
      static_cast<double>(options.micro_batch * options.sequence_length);
  return result;
}

}  // namespace muster
