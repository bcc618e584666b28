#include "tools/muster/options.h"

#include <fmt/format.h>

#include <boost/program_options/parsers.hpp>
#include <boost/program_options/positional_options.hpp>
#include <cstdlib>
#include <sstream>

#include "common/error.h"
#include "worker/agent/agent.h"

namespace muster {

namespace po = boost::program_options;

Options::Options(std::string synopsis, std::string description)
    : synopsis_(std::move(synopsis)), description_(std::move(description)), named_("options") {
  add()("help,h", "print this and leave");
}

void Options::positional(const std::string& name, int count) {
  positional_.emplace_back(name, count);
}

void Options::add_coordinator() {
  add()("coordinator", po::value<std::string>()->value_name("ENDPOINT"),
        "where the coordinator listens: tcp://HOST:PORT (required)");
  add_run_key();
}

void Options::add_run_key() {
  add()("run-key", po::value<std::string>()->value_name("FILE"),
        "the run's key, RUN_DIR/run.key; without it the variable MUSTER_RUN_KEY is taken");
}

bool Options::parse(const Arguments& arguments) {
  po::options_description all;
  po::positional_options_description positions;
  all.add(named_);
  for (const auto& [name, count] : positional_) {
    all.add_options()(name.c_str(), po::value<std::vector<std::string>>());
    positions.add(name.c_str(), count);
  }
  try {
    // Guessing is off: a prefix that is unique today may not be tomorrow.
    const int style = po::command_line_style::unix_style & ~po::command_line_style::allow_guessing;
    po::store(
        po::command_line_parser(arguments).options(all).positional(positions).style(style).run(),
        values_);
  } catch (const po::error& error) {
    fail(error.what());
  }
  if (has("help")) {
    std::ostringstream text;
    text << named_;
    fmt::print("usage: muster {}\n\n{}\n\n{}{}{}", synopsis_, description_, text.str(),
               epilogue_.empty() ? "" : "\n", epilogue_);
    return false;
  }
  return true;
}

void Options::fail(const std::string& why) const {
  throw UsageError(fmt::format("{}\nusage: muster {}\n`muster {} --help` says more", why, synopsis_,
                               synopsis_.substr(0, synopsis_.find(' '))));
}

std::string Options::required(const std::string& name) const {
  for (const auto& [positional, count] : positional_) {
    if (positional != name) continue;
    if (!has(name)) fail(name + " is missing");
    return all(name).front();
  }
  if (!has(name)) fail("--" + name + " is missing");
  return get<std::string>(name);
}

std::vector<std::string> Options::all(const std::string& name) const {
  return has(name) ? get<std::vector<std::string>>(name) : std::vector<std::string>();
}

Security Options::security() const {
  if (has("run-key")) return {read_run_key(get<std::string>("run-key"))};
  const char* key = std::getenv(kRunKeyVariable);
  return {key == nullptr ? "" : key};
}

}  // namespace muster
