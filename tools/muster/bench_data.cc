// The data path on real text: how long a service takes to start, and how fast a worker gets
// batches.
#include <fmt/format.h>

#include <memory>

#include "common/files.h"
#include "common/process.h"
#include "data/bench.h"
#include "tools/muster/bench.h"
#include "tools/muster/bench_corpus.h"

namespace muster {
namespace {

constexpr double kMegabyte = 1e6;

std::shared_ptr<void> start_process(const std::string& coordinator) {
  ChildOptions options;
  options.name = "data service";
  options.argv = {own_program(), "data", "--coordinator", coordinator};
  options.environment = {{"MUSTER_LOG", "error"}};
  return std::make_shared<Child>(Child::spawn(options));
}

}  // namespace

std::vector<BenchResult> bench_data() {
  const TempDir made;
  DataBenchOptions options;
  options.start_service = start_process;
  options.sources = {bench_corpus(made.path())};
  const DataBenchResult result = bench_data_service(options);
  const auto batches = [&](const char* what, double text_bytes_per_s) -> BenchResult {
    return {what, text_bytes_per_s / kMegabyte, "MB/s of text",
            fmt::format("{:.0f} MB/s through the ring",
                        text_bytes_per_s * result.ring_bytes_per_text_byte / kMegabyte)};
  };
  return {{"first start", result.first_start_s, "s",
           fmt::format("{} documents, {:.1f} MB read and indexed", result.documents,
                       static_cast<double>(result.text_bytes) / kMegabyte)},
          {"second start", result.second_start_s, "s", "with the index on disk"},
          batches("batches in order", result.in_order_text_bytes_per_s),
          batches("batches shuffled", result.shuffled_text_bytes_per_s)};
}

}  // namespace muster
