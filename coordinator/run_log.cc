#include "coordinator/run_log.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/hash.h"
#include "common/logging.h"

namespace muster {

namespace {

using Json = nlohmann::ordered_json;

// JSON has no NaN and no infinity; null is what readers of a loss curve expect there.
Json number(double value) {
  return std::isfinite(value) ? Json(value) : Json();
}

}  // namespace

template <typename Write>
void RunLog::guard(Write write) noexcept {
  try {
    write();
  } catch (const std::exception& e) {
    if (!failed_) spdlog::warn("the journal is incomplete from now on: {}", e.what());
    failed_ = true;
  }
}

RunLog::RunLog(const RunDir& run, bool debug_samples)
    : run_(run), debug_samples_(debug_samples), journal_(run.journal()), events_(run.events()) {}

void RunLog::set_run(const std::string& key, const std::string& value) noexcept {
  guard([&] { journal_.set_run(key, value); });
}

void RunLog::open_steps(int64_t resume_step) {
  // A planned change forgets nothing, and should not read all of a long run for it.
  if (metrics_ && newest_step_ <= resume_step && !failed_) return;
  metrics_.reset();
  samples_.reset();
  forget_steps_after(run_.metrics(), resume_step);
  forget_steps_after(run_.samples(), resume_step);
  metrics_.emplace(run_.metrics());
  newest_step_ = resume_step;
  if (debug_samples_) samples_.emplace(run_.samples());
}

void RunLog::go_on() {
  open_steps(journal_.last_step());
}

void RunLog::begin_generation(uint64_t generation, int64_t resume_step, const std::string& reason,
                              const std::vector<Member>& members) {
  open_steps(resume_step);
  Json list = Json::array();
  int world = 0;
  for (const Member& member : members) {
    if (member.role != MemberRole::kWorker || member.state != MemberState::kActive) continue;
    ++world;
    list.push_back({{"rank", member.rank},
                    {"member", member.id},
                    {"node", member.node_id},
                    {"host", member.host},
                    {"pid", member.pid}});
  }
  guard([&] { journal_.begin_generation(generation, world, resume_step, reason, list.dump()); });
}

void RunLog::event(const Event& event) noexcept {
  spdlog::info("{}: {}", event.kind, event.reason);
  events_.append({{"time", timestamp()},
                  {"kind", event.kind},
                  {"reason", event.reason},
                  {"duration_s", event.duration_s},
                  {"step", event.step},
                  {"generation", event.generation}});
  guard([&] { journal_.add_event(event.kind, event.reason); });
}

void RunLog::step(const StepMetrics& metrics, std::vector<TrainedSample> samples) noexcept {
  guard([&] {
    newest_step_ = std::max(newest_step_, metrics.step);
    Json line = {{"step", metrics.step},
                 {"tokens", metrics.tokens},
                 {"total_tokens", metrics.total_tokens},
                 {"loss", number(metrics.loss)},
                 {"grad_norm", number(metrics.grad_norm)},
                 {"lr", metrics.lr},
                 {"tokens_per_s", metrics.tokens_per_s()},
                 {"step_s", metrics.step_s},
                 {"data_wait_s", metrics.data_wait_s},
                 {"comm_wait_s", metrics.comm_wait_s},
                 {"mem_bytes", metrics.mem_bytes},
                 {"world", metrics.world},
                 {"generation", metrics.generation}};
    if (metrics.mfu > 0) line["mfu"] = metrics.mfu;
    if (metrics.mirror_s > 0) line["mirror_s"] = metrics.mirror_s;
    if (metrics.has_held_out) line["held_out_loss"] = number(metrics.held_out_loss);
    if (metrics.skipped) line["skipped"] = true;
    metrics_->append(line);
    if (samples_) {
      std::sort(samples.begin(), samples.end());
      Json ids = Json::array();
      Json hashes = Json::array();
      for (const TrainedSample& sample : samples) {
        ids.push_back(sample.id);
        hashes.push_back(to_hex(sample.hash));
      }
      samples_->append({{"step", metrics.step}, {"samples", ids}, {"hashes", hashes}});
    }
    journal_.commit_step(metrics.step, metrics.generation, metrics.tokens, metrics.loss);
  });
}

void RunLog::checkpoint(int64_t step, uint64_t generation) noexcept {
  guard([&] { journal_.commit_checkpoint(step, generation); });
}

}  // namespace muster
