// muster bench.
#include "tools/muster/bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "common/config/suggest.h"
#include "common/error.h"
#include "common/logging.h"
#include "tools/muster/command.h"
#include "tools/muster/options.h"

namespace muster {

const std::vector<Benchmark>& benchmarks() {
  static const std::vector<Benchmark> all_benchmarks = {
      {"control", "round trip of a message to the coordinator", bench_control},
      {"data", "start of the data service, and text through its ring to a worker", bench_data},
      {"elastic",
       "changes of size and load of the coordinator, in simulated clusters of up to 4096",
       bench_elastic},
      {"kernels", "CPU kernels, beside this machine's copy and multiply-add ceilings",
       bench_kernels},
      {"train", "a run of the demo's model: its start, and its speed beside PyTorch's",
       bench_train},
  };
  return all_benchmarks;
}

double median_seconds(int warmup, int repetitions, const std::function<void()>& call) {
  using Clock = std::chrono::steady_clock;
  for (int i = 0; i < warmup; ++i) call();
  std::vector<double> seconds;
  seconds.reserve(repetitions);
  for (int i = 0; i < repetitions; ++i) {
    const Clock::time_point begin = Clock::now();
    call();
    seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  const auto middle = seconds.begin() + repetitions / 2;
  std::nth_element(seconds.begin(), middle, seconds.end());
  return *middle;
}

namespace {

std::vector<Benchmark> selected(const std::vector<std::string>& names) {
  if (names.empty()) return benchmarks();
  std::vector<std::string> known;
  for (const Benchmark& benchmark : benchmarks()) known.emplace_back(benchmark.name);
  std::vector<Benchmark> chosen;
  for (const std::string& name : names) {
    const auto found = std::find(known.begin(), known.end(), name);
    if (found == known.end()) {
      const std::string guess = nearest(name, known);
      throw UsageError(fmt::format("unknown benchmark \"{}\"{}; `muster bench --list` lists all",
                                   name, guess.empty() ? "" : ", did you mean \"" + guess + "\"?"));
    }
    chosen.push_back(benchmarks()[found - known.begin()]);
  }
  return chosen;
}

void print_json(const Benchmark& benchmark, const std::vector<BenchResult>& results) {
  for (const BenchResult& result : results) {
    fmt::print("{}\n", nlohmann::ordered_json{{"benchmark", benchmark.name},
                                              {"what", result.what},
                                              {"value", result.value},
                                              {"unit", result.unit},
                                              {"note", result.note}}
                           .dump());
  }
}

void print_table(const Benchmark& benchmark, const std::vector<BenchResult>& results) {
  fmt::print("{}: {}\n", benchmark.name, benchmark.summary);
  for (const BenchResult& result : results) {
    fmt::print("  {:<44} {:>10.5g} {:<10} {}\n", result.what, result.value, result.unit,
               result.note);
  }
}

}  // namespace

int bench_command(const Arguments& arguments) {
  Options options("bench [NAME…]",
                  "Runs the named benchmarks, or all. Close other programs first.");
  options.positional("NAME", -1);
  options.add()("list", "list the benchmarks and leave")("json", "print a JSON object a result");
  if (!options.parse(arguments)) return 0;
  if (options.has("list")) {
    for (const Benchmark& benchmark : benchmarks()) {
      fmt::print("{:<12} {}\n", benchmark.name, benchmark.summary);
    }
    return 0;
  }
  init_logging("bench");
  for (const Benchmark& benchmark : selected(options.all("NAME"))) {
    const std::vector<BenchResult> results = benchmark.run();
    options.has("json") ? print_json(benchmark, results) : print_table(benchmark, results);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace muster
