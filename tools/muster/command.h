// The commands of muster. Each is a file of its own; main.cc picks one.
#pragma once

#include <string>
#include <vector>

namespace muster {

using Arguments = std::vector<std::string>;

struct Command {
  const char* name;
  const char* summary;
  // Gets the arguments after the command's name. Returns the exit code: 0 on success, 1 on failure,
  // 2 on bad usage or config. Throws Error.
  int (*run)(const Arguments& arguments);
};

// In the order of the help.
const std::vector<Command>& commands();
// Runs `muster ARGUMENTS…`: picks the command, reports what it throws on stderr, returns the exit
// code.
int run_muster(const Arguments& arguments);

// Writes to stderr; where that cannot be written to (a log on a full disk), the text is lost and
// nothing else.
void print_error(const std::string& text) noexcept;

int train_command(const Arguments& arguments);
int coordinator_command(const Arguments& arguments);
int node_command(const Arguments& arguments);
int worker_command(const Arguments& arguments);
int data_command(const Arguments& arguments);
int status_command(const Arguments& arguments);
int scale_command(const Arguments& arguments);
int drain_command(const Arguments& arguments);
int stop_command(const Arguments& arguments);
int generate_command(const Arguments& arguments);
int estimate_command(const Arguments& arguments);
int bench_command(const Arguments& arguments);
int doctor_command(const Arguments& arguments);

}  // namespace muster
