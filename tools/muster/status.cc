// muster status, muster stop.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "tools/muster/command.h"
#include "tools/muster/format.h"
#include "tools/muster/observer.h"
#include "tools/muster/options.h"

namespace muster {
namespace {

namespace po = boost::program_options;

constexpr std::chrono::seconds kPatience(5);

const char* name_of(proto::Role role) {
  switch (role) {
    case proto::ROLE_NODE:
      return "node";
    case proto::ROLE_DATA:
      return "data";
    case proto::ROLE_WORKER:
      return "worker";
    case proto::ROLE_OBSERVER:
      return "observer";
    default:
      return "unknown";
  }
}

nlohmann::ordered_json to_json(const proto::Status& status) {
  nlohmann::ordered_json json = {
      {"run", status.run_name()},
      {"run_dir", status.run_dir()},
      {"phase", status.phase()},
      {"reason", status.reason()},
      {"generation", status.generation()},
      {"step", status.step()},
      {"total_steps", status.total_steps()},
      {"tokens", status.tokens()},
      {"loss", status.loss()},
      {"held_out_loss", nullptr},
      {"tokens_per_s", status.tokens_per_s()},
      {"lr", status.lr()},
      {"grad_norm", status.grad_norm()},
      {"checkpoint_step", status.checkpoint_step()},
      {"elapsed_s", status.elapsed_s()},
      {"skipped_files", status.skipped_files()},
      {"partly_used_files", status.partly_used_files()},
      {"finished", status.finished()},
      {"ok", status.ok()},
      {"members", nlohmann::ordered_json::array()},
  };
  if (status.has_held_out()) json["held_out_loss"] = status.held_out_loss();
  for (const proto::MemberStatus& member : status.members()) {
    json["members"].push_back({{"id", member.member_id()},
                               {"role", name_of(member.role())},
                               {"state", member.state()},
                               {"host", member.host()},
                               {"pid", member.pid()},
                               {"rank", member.rank()},
                               {"heartbeat_age_s", member.heartbeat_age_s()}});
  }
  return json;
}

void print_table(const proto::Status& status) {
  fmt::print("{} in {}\n{}{}{}, generation {}, running for {}\n", status.run_name(),
             status.run_dir(), status.phase(), status.reason().empty() ? "" : ": ", status.reason(),
             status.generation(), format_duration(status.elapsed_s()));
  fmt::print("{}, lr {:.3g}, gradient norm {:.3g}\n", progress_line(status), status.lr(),
             status.grad_norm());
  fmt::print("checkpoint: {}\n", status.checkpoint_step() == 0
                                     ? "none yet"
                                     : fmt::format("step {}", status.checkpoint_step()));
  if (const std::string files = unused_files(status); !files.empty()) fmt::print("{}\n", files);
  fmt::print("\n{:<8} {:<9} {:>4} {:<20} {:>8} {:>10}  {}\n", "role", "state", "rank", "host",
             "pid", "heartbeat", "id");
  for (const proto::MemberStatus& member : status.members()) {
    const bool ranked = member.role() == proto::ROLE_WORKER && member.rank() >= 0;
    fmt::print("{:<8} {:<9} {:>4} {:<20} {:>8} {:>8.1f} s  {}\n", name_of(member.role()),
               member.state(), ranked ? std::to_string(member.rank()) : "", member.host(),
               member.pid(), member.heartbeat_age_s(), member.member_id());
  }
}

// Says what to do when the coordinator's file is there but nobody answers.
[[noreturn]] void explain_silence(const std::string& run, const TimeoutError& error) {
  throw TimeoutError(
      fmt::format("{}: {}; if the run was killed, the next `muster train` goes on from "
                  "its newest checkpoint",
                  run, error.what()));
}

}  // namespace

int status_command(const Arguments& arguments) {
  Options options(
      "status RUN [--json]",
      "Shows where a running run is. RUN is its directory or the coordinator's endpoint.");
  options.positional("RUN");
  options.add_run_key();
  options.add()("json", "print one JSON object");
  if (!options.parse(arguments)) return 0;
  const std::string run = options.required("RUN");
  Observer observer(find_run(run, options.security()));
  try {
    const proto::Status status = observer.status(Deadline::after(kPatience));
    if (options.has("json")) {
      fmt::print("{}\n", to_json(status).dump(2));
    } else {
      print_table(status);
    }
  } catch (const TimeoutError& error) {
    explain_silence(run, error);
  }
  return 0;
}

int stop_command(const Arguments& arguments) {
  Options options("stop RUN [--now]",
                  "Lets a running run finish its step, save and end. RUN is its directory or the\n"
                  "coordinator's endpoint. Returns once the coordinator has accepted.");
  options.positional("RUN");
  options.add_run_key();
  options.add()("now", "end at once: what was trained since the last checkpoint is lost");
  if (!options.parse(arguments)) return 0;
  const std::string run = options.required("RUN");
  Observer observer(find_run(run, options.security()));
  try {
    observer.stop("muster stop", options.has("now"), Deadline::after(kPatience));
  } catch (const TimeoutError& error) {
    explain_silence(run, error);
  }
  fmt::print("{}: stopping\n", run);
  return 0;
}

}  // namespace muster
