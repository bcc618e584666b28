#include "coordinator/left_behind.h"

#include <fmt/format.h>
#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/files.h"
#include "common/logging.h"
#include "common/protocol/muster.pb.h"
#include "coordinator/checkpoints.h"
#include "coordinator/run_log.h"
#include "coordinator/save_ledger.h"
#include "coordinator/step_ledger.h"

namespace muster {

namespace {

namespace fs = std::filesystem;

constexpr const char* kFarewell = ".farewell";

// What lies in one folder.
struct Left {
  std::string folder;
  int world = 0;
  CompleteSave save;
  uint64_t generation = 0;
  std::vector<proto::Farewell> farewells;
};

// Throws CheckpointError unless the farewell is one of the folder's step and generation, and of as
// many parts as the others: what is counted by them must not come from damage.
void check_belongs(const RunDir& run, const std::string& folder, const proto::Farewell& farewell,
                   int world) {
  const proto::ShardSaved& saved = farewell.saved();
  const bool named = folder == run.left_behind(saved.step(), saved.generation()) ||
                     folder == run.partial_checkpoint(saved.step());
  if (named && saved.step() > 0 && farewell.world_size() == world) return;
  throw CheckpointError(
      fmt::format("a worker's farewell is of part {} of {}, step {}, generation {}", saved.part(),
                  farewell.world_size(), saved.step(), saved.generation()));
}

// Nullopt unless all parts are there. Throws Error or fs::filesystem_error where something is
// damaged.
std::optional<Left> read_left(const RunDir& run, const std::string& folder) {
  Left left;
  left.folder = folder;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != kFarewell) continue;
    proto::Farewell farewell;
    if (!farewell.ParseFromString(read_file(entry.path()))) {
      throw CheckpointError(entry.path().filename().string() + " is damaged");
    }
    left.farewells.push_back(std::move(farewell));
  }
  if (left.farewells.empty()) return std::nullopt;
  const proto::Farewell& first = left.farewells.front();
  left.world = first.world_size();
  left.generation = first.saved().generation();
  for (const auto& farewell : left.farewells) check_belongs(run, folder, farewell, left.world);
  SaveLedger parts(left.generation, left.world);
  parts.expect(first.saved().step());
  for (const proto::Farewell& farewell : left.farewells) {
    auto whole = parts.add(farewell.saved());
    if (!whole) continue;
    left.save = std::move(*whole);
    if (left.save.error.empty()) return left;
  }
  spdlog::warn("{}: {} of {} parts of a state were left there, which is not enough", folder,
               left.farewells.size(), left.world);
  return std::nullopt;
}

// Calls `action`; what is wrong with the folder is logged, and no reason not to start.
template <typename Action>
void guard(const std::string& folder, Action action) {
  try {
    action();
  } catch (const Error& error) {
    spdlog::warn("{}: {}", folder, error.what());
  } catch (const fs::filesystem_error& error) {
    spdlog::warn("{}: {}", folder, error.what());
  }
}

std::vector<Left> find_left(const RunDir& run) {
  std::vector<Left> found;
  std::error_code missing;
  for (fs::directory_iterator it(run.checkpoints(), missing), end; !missing && it != end;
       it.increment(missing)) {
    // Also one whose adoption was cut short: it has its other name then.
    const std::string folder = it->path();
    if (!it->path().filename().string().starts_with(RunDir::kPartialPrefix)) continue;
    guard(folder, [&] {
      if (auto left = read_left(run, folder)) found.push_back(std::move(*left));
    });
  }
  std::sort(found.begin(), found.end(),
            [](const Left& a, const Left& b) { return a.save.step > b.save.step; });
  return found;
}

// What was reported of the steps after `step`; nullopt where one is missing.
std::optional<std::vector<CompleteStep>> steps_after(int64_t step, const Left& left) {
  StepLedger ledger(left.generation, left.world, step);
  for (int64_t next = step + 1; next <= left.save.step; ++next) ledger.expect(next, false);
  for (const proto::Farewell& farewell : left.farewells) {
    for (const proto::EvalReport& report : farewell.evaluations()) ledger.add(report);
    for (const proto::StepReport& report : farewell.steps()) ledger.add(report);
  }
  std::vector<CompleteStep> steps;
  while (auto complete = ledger.take()) steps.push_back(std::move(*complete));
  if (step + static_cast<int64_t>(steps.size()) < left.save.step) return std::nullopt;
  return steps;
}

DatasetFacts dataset_of(const RunLog& log) {
  proto::SessionState kept;
  if (!google::protobuf::util::JsonStringToMessage(log.session(), &kept).ok() ||
      kept.datasets_size() == 0) {
    throw CheckpointError("the journal does not tell which dataset it was trained on");
  }
  const auto& dataset = kept.datasets(0);
  return {dataset.fingerprint(), dataset.train_samples(), dataset.held_out_samples(),
          dataset.vocab_size()};
}

// False where the log lacks steps before it.
bool adopt(const RunDir& run, const Left& left) {
  RunLog log(run, fs::exists(run.samples()));
  const auto steps = steps_after(log.last_step(), left);
  if (!steps) {
    spdlog::warn("{}: nobody reports of all the steps after {}", left.folder, log.last_step());
    return false;
  }
  // The log may have come further than the state.
  const auto history =
      log.token_history(std::max<int64_t>(log.last_step() - left.save.step, 0) + 1);
  const auto counted = history.upper_bound(left.save.step);
  int64_t tokens = counted == history.begin() ? 0 : std::prev(counted)->second;
  const Config config = parse_config(read_file(run.config()), run.config());
  Manifest manifest{.step = left.save.step,
                    .generation = left.generation,
                    .world_size = left.world,
                    .seed = config.run.seed,
                    .tokens = tokens,
                    .global_batch = config.train.global_batch,
                    .dataset = dataset_of(log),
                    .config_toml = to_toml(config),
                    .files = left.save.files};
  for (const CompleteStep& step : *steps) manifest.tokens += step.metrics.tokens;
  if (left.folder != run.partial_checkpoint(manifest.step)) {
    discard_partial(run, manifest.step);
    fs::rename(left.folder, run.partial_checkpoint(manifest.step));
  }
  // The steps first: a checkpoint that the log has not come to would leave a gap in it.
  log.go_on();
  for (CompleteStep step : *steps) {
    tokens += step.metrics.tokens;
    step.metrics.total_tokens = tokens;
    log.step(step.metrics, std::move(step.samples));
  }
  commit_checkpoint(run, manifest, left.save.worker_json);
  // Last: until then another coordinator can do all of this again.
  for (int part = 0; part < left.world; ++part) {
    std::error_code stays;
    fs::remove(fmt::format("{}/{}{}", run.checkpoint(manifest.step), part, kFarewell), stays);
  }
  log.checkpoint(manifest.step, manifest.generation);
  log.event({.kind = "checkpoint",
             .reason = fmt::format("step {} is saved: its {} workers had left it behind when their "
                                   "coordinator was gone",
                                   manifest.step, left.world),
             .step = manifest.step,
             .generation = left.generation});
  return true;
}

}  // namespace

void adopt_left_behind(const RunDir& run) {
  const std::vector<Left> found = find_left(run);
  if (found.empty()) return;
  const CheckpointChoice newest = choose_checkpoint(run);
  for (const Left& left : found) {
    if (newest.found && left.save.step <= newest.manifest.step) break;
    bool adopted = false;
    guard(left.folder, [&] { adopted = adopt(run, left); });
    if (adopted) break;
  }
}

}  // namespace muster
