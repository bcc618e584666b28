// muster scale, muster drain, muster stop.
#include <fmt/format.h>

#include "tools/muster/command.h"
#include "tools/muster/observer.h"
#include "tools/muster/options.h"

namespace muster {

namespace po = boost::program_options;

namespace {

// The member id of the worker that has the rank `who`; else `who`. Several may be named in one
// command, and the first to leave changes the ranks of the others.
std::string fixed_name(const proto::Status& status, const std::string& who) {
  for (const proto::MemberStatus& member : status.members()) {
    if (member.role() == proto::ROLE_WORKER && member.state() != "gone" && member.rank() >= 0 &&
        std::to_string(member.rank()) == who) {
      return member.member_id();
    }
  }
  return who;
}

}  // namespace

int scale_command(const Arguments& arguments) {
  Options options(
      "scale RUN --workers N",
      "Changes how many workers a running run has, at a step boundary and without a restart: the\n"
      "youngest workers hand their state over and leave, or the nodes start more. RUN is the "
      "run's\n"
      "directory or the coordinator's endpoint. Returns once the coordinator has accepted.");
  options.positional("RUN");
  options.add_run_key();
  options.add()("workers", po::value<int>()->value_name("N"), "how many it is to have (required)");
  if (!options.parse(arguments)) return 0;
  const std::string run = options.required("RUN");
  if (!options.has("workers")) options.fail("--workers is missing");
  const int workers = options.get<int>("workers");
  if (workers < 1) {
    options.fail(fmt::format("--workers {}: must be at least 1; `muster stop` saves and ends a run",
                             workers));
  }
  ask_run(run, options.security(), [&](Observer& observer) {
    fmt::print("{}: {}\n", run, observer.scale(workers, Deadline::after(kAnswerPatience)));
  });
  return 0;
}

int drain_command(const Arguments& arguments) {
  Options options(
      "drain RUN WHO… [--reason TEXT]",
      "Takes workers out of a running run: at the next step boundary they hand their state over "
      "and\n"
      "leave, and the run goes on without them. WHO is a worker's rank, a member's id (`muster\n"
      "status` lists both), or a host, which stands for all that is on it. RUN is the run's\n"
      "directory or the coordinator's endpoint. Returns once the coordinator has accepted.");
  options.positional("RUN");
  options.positional("WHO", -1);
  options.add_run_key();
  options.add()("reason",
                po::value<std::string>()->value_name("TEXT")->default_value("muster drain"),
                "what events.jsonl is to say");
  if (!options.parse(arguments)) return 0;
  const std::string run = options.required("RUN");
  options.required("WHO");
  ask_run(run, options.security(), [&](Observer& observer) {
    const proto::Status status = observer.status(Deadline::after(kAnswerPatience));
    for (const std::string& who : options.all("WHO")) {
      const std::string what =
          observer.drain(fixed_name(status, who), options.get<std::string>("reason"),
                         Deadline::after(kAnswerPatience));
      fmt::print("{}: leaving: {}\n", run, what);
    }
  });
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
  ask_run(run, options.security(), [&](Observer& observer) {
    observer.stop("muster stop", options.has("now"), Deadline::after(kAnswerPatience));
  });
  fmt::print("{}: stopping\n", run);
  return 0;
}

}  // namespace muster
