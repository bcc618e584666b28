// The options of a command over Boost.Program_options: --help with defaults, and errors that say
// where to look.
#pragma once

#include <boost/program_options/options_description.hpp>
#include <boost/program_options/value_semantic.hpp>
#include <boost/program_options/variables_map.hpp>
#include <optional>
#include <string>
#include <vector>

#include "common/transport/transport.h"
#include "tools/muster/command.h"

namespace muster {

class Options {
 public:
  // `synopsis`: "train CONFIG [--workers N]". `description`: a sentence or more for --help.
  Options(std::string synopsis, std::string description);

  // Declares named options, as options_description::add_options() does.
  boost::program_options::options_description_easy_init add() { return named_.add_options(); }
  // Declares the next positional argument; `count` of them, -1: all that follow.
  void positional(const std::string& name, int count = 1);
  // --coordinator, required, and --run-key: how to reach the coordinator.
  void add_coordinator();
  void add_run_key();
  // Text after the options in --help.
  void add_epilogue(std::string text) { epilogue_ = std::move(text); }

  // False when --help was asked for, which has been printed. Throws UsageError.
  bool parse(const Arguments& arguments);

  bool has(const std::string& name) const { return values_.count(name) > 0; }
  template <typename T>
  T get(const std::string& name) const {
    return values_[name].as<T>();
  }
  // Throws UsageError naming the argument if it was not given.
  std::string required(const std::string& name) const;
  // All values of a repeated option or argument.
  std::vector<std::string> all(const std::string& name) const;
  // Throws UsageError with the usage below `why`.
  [[noreturn]] void fail(const std::string& why) const;
  // The run key of --run-key FILE, else of MUSTER_RUN_KEY, else none.
  Security security() const;

 private:
  std::string synopsis_;
  std::string description_;
  std::string epilogue_;
  boost::program_options::options_description named_;
  std::vector<std::pair<std::string, int>> positional_;
  boost::program_options::variables_map values_;
};

}  // namespace muster
