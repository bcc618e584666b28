// Named benchmarks. Each lives in a bench_NAME.cc that defines one function declared here; bench.cc
// lists them.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace muster {

// One measured number. `note` says what it is compared with ("61 % of the measured peak of 130
// GFLOP/s").
struct BenchResult {
  std::string what;  // "round trip, plain"
  double value = 0.0;
  std::string unit;  // "us", "MB/s", "tokens/s"
  std::string note;
};

struct Benchmark {
  const char* name;
  const char* summary;
  std::vector<BenchResult> (*run)();
};

// In the order in which they run.
const std::vector<Benchmark>& benchmarks();

// Median of the seconds that `repetitions` calls take, after `warmup` calls that do not count.
double median_seconds(int warmup, int repetitions, const std::function<void()>& call);

std::vector<BenchResult> bench_control();
std::vector<BenchResult> bench_data();
std::vector<BenchResult> bench_elastic();
std::vector<BenchResult> bench_kernels();
std::vector<BenchResult> bench_train();

}  // namespace muster
