#include "tools/muster/command.h"

#include <fmt/format.h>

#include <cstdio>

#include "common/config/suggest.h"
#include "common/error.h"
#include "common/transport/transport.h"

namespace muster {
namespace {

std::string help() {
  std::string text =
      "usage: muster COMMAND [ARGUMENTS]\n\n"
      "Trains transformers on a cluster. `muster COMMAND --help` says more.\n\n";
  for (const Command& command : commands()) {
    text += fmt::format("  {:<12} {}\n", command.name, command.summary);
  }
  return text;
}

const Command& find_command(const std::string& name) {
  std::vector<std::string> names;
  for (const Command& command : commands()) {
    if (name == command.name) return command;
    names.emplace_back(command.name);
  }
  const std::string guess = nearest(name, names);
  throw UsageError(fmt::format("unknown command \"{}\"{}; `muster --help` lists all", name,
                               guess.empty() ? "" : ", did you mean \"" + guess + "\"?"));
}

int dispatch(const Arguments& arguments) {
  if (arguments.empty()) throw UsageError("which command? `muster --help` lists all");
  const std::string& name = arguments.front();
  if (name == "--help" || name == "-h" || name == "help") {
    fmt::print("{}", help());
    return 0;
  }
  if (name == "--version") {
    fmt::print("muster {}\n", kBuildVersion);
    return 0;
  }
  return find_command(name).run({arguments.begin() + 1, arguments.end()});
}

}  // namespace

const std::vector<Command>& commands() {
  static const std::vector<Command> all_commands = {
      {"train", "train on this machine: coordinator, data service and workers", train_command},
      {"coordinator", "the control plane of a run", coordinator_command},
      {"node", "one node's agent, data service and workers", node_command},
      {"worker", "one worker; started by the node agent", worker_command},
      {"data", "a node's data service; started by the node agent", data_command},
      {"status", "look at a running run", status_command},
      {"scale", "change how many workers a running run has", scale_command},
      {"drain", "take workers or nodes out of a running run", drain_command},
      {"stop", "let a running run finish its step, save and end", stop_command},
      {"generate", "continue a text with a trained model", generate_command},
      {"estimate", "what memory a run needs, before anything is allocated", estimate_command},
      {"bench", "measure this machine", bench_command},
      {"doctor", "what this machine can run, and what is wrong with it", doctor_command},
  };
  return all_commands;
}

void print_error(const std::string& text) noexcept {
  std::fputs(text.c_str(), stderr);
  std::fflush(stderr);
}

int run_muster(const Arguments& arguments) {
  const std::string who = arguments.empty() || arguments.front().starts_with('-')
                              ? "muster"
                              : "muster " + arguments.front();
  try {
    const int code = dispatch(arguments);
    if (code == 0 && (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)) {
      throw IoError("the output could not be written");
    }
    return code;
  } catch (const Error& error) {
    print_error(fmt::format("{}: {}\n", who, error.what()));
    return error.exit_code();
  } catch (const std::exception& error) {
    print_error(fmt::format("{}: unexpected: {}\n", who, error.what()));
    return 1;
  }
}

}  // namespace muster
