// muster status.
#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>

#include "tools/muster/command.h"
#include "tools/muster/format.h"
#include "tools/muster/observer.h"
#include "tools/muster/options.h"

namespace muster {
namespace {

namespace po = boost::program_options;

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
      {"workers", training_workers(status)},
      {"target_workers", nullptr},
      {"min_workers", status.min_workers()},
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
      {"pause_s", status.pause_s()},
      {"paused_total_s", status.paused_total_s()},
      {"goodput", status.goodput()},
      {"redone_steps", status.redone_steps()},
      {"skipped_files", status.skipped_files()},
      {"partly_used_files", status.partly_used_files()},
      {"finished", status.finished()},
      {"ok", status.ok()},
      {"members", nlohmann::ordered_json::array()},
  };
  if (status.target_workers() > 0) json["target_workers"] = status.target_workers();
  if (status.has_held_out()) json["held_out_loss"] = status.held_out_loss();
  for (const proto::MemberStatus& member : status.members()) {
    json["members"].push_back({{"id", member.member_id()},
                               {"role", name_of(member.role())},
                               {"state", member.state()},
                               {"host", member.host()},
                               {"pid", member.pid()},
                               {"rank", member.rank()},
                               {"heartbeat_age_s", member.heartbeat_age_s()},
                               {"step_s", member.step_s()},
                               {"wait_s", member.wait_s()},
                               {"slow", member.slow()},
                               {"link_errors", member.link_errors()}});
  }
  return json;
}

// "3 active, 1 standby; 4 wanted; at least 2"
std::string workers_line(const proto::Status& status) {
  std::map<std::string, int> in_state;
  for (const proto::MemberStatus& member : status.members()) {
    if (member.role() == proto::ROLE_WORKER) ++in_state[member.state()];
  }
  in_state.erase("gone");
  std::string line;
  for (const auto& [state, count] : in_state) {
    line += fmt::format("{}{} {}", line.empty() ? "" : ", ", count, state);
  }
  if (line.empty()) line = "none";
  if (status.target_workers() > 0) line += fmt::format("; {} wanted", status.target_workers());
  if (status.min_workers() > 1) line += fmt::format("; at least {}", status.min_workers());
  return line;
}

std::string pause_text(double seconds) {
  return seconds < 10 ? fmt::format("{:.2f} s", seconds) : format_duration(seconds);
}

std::string goodput_line(const proto::Status& status) {
  std::string line =
      fmt::format("{:.1f} % of the time went into steps that count", 100 * status.goodput());
  if (status.paused_total_s() > 0) {
    line += fmt::format("; paused {} at the last change of generation, {} in all",
                        pause_text(status.pause_s()), pause_text(status.paused_total_s()));
  }
  if (const int64_t redone = status.redone_steps(); redone > 0) {
    line += fmt::format("; {} step{} done twice", redone, redone == 1 ? "" : "s");
  }
  return line;
}

void print_member(const proto::MemberStatus& member) {
  const bool worker = member.role() == proto::ROLE_WORKER;
  const auto seconds = [](bool known, double value) {
    return known ? fmt::format("{:.2f} s", value) : std::string();
  };
  fmt::print(
      "{:<8} {:<12} {:>4} {:<20} {:>8} {:>8.1f} s {:>9} {:>9}  {}\n", name_of(member.role()),
      member.state() + (member.slow() ? " slow" : "") +
          (member.link_errors() > 0 ? fmt::format(" {} link err", member.link_errors()) : ""),
      worker && member.rank() >= 0 ? std::to_string(member.rank()) : "", member.host(),
      member.pid(), member.heartbeat_age_s(), seconds(member.step_s() > 0, member.step_s()),
      seconds(member.step_s() > 0, member.wait_s()), member.member_id());
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
  fmt::print("workers: {}\n", workers_line(status));
  if (status.goodput() > 0) fmt::print("goodput: {}\n", goodput_line(status));
  if (const std::string files = unused_files(status); !files.empty()) fmt::print("{}\n", files);
  fmt::print("\n{:<8} {:<12} {:>4} {:<20} {:>8} {:>10} {:>9} {:>9}  {}\n", "role", "state", "rank",
             "host", "pid", "heartbeat", "step", "waiting", "id");
  // Those that are gone would soon be the most of a long run's list; --json has them.
  int gone = 0;
  for (const proto::MemberStatus& member : status.members()) {
    if (member.state() == "gone") {
      ++gone;
    } else {
      print_member(member);
    }
  }
  if (gone > 0) fmt::print("{} more {} gone\n", gone, gone == 1 ? "is" : "are");
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
  ask_run(options.required("RUN"), options.security(), [&](Observer& observer) {
    const proto::Status status = observer.status(Deadline::after(kAnswerPatience));
    if (options.has("json")) {
      fmt::print("{}\n", to_json(status).dump(2));
    } else {
      print_table(status);
    }
  });
  return 0;
}

}  // namespace muster
