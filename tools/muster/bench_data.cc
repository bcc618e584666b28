// The data path on real text: how long a service takes to start, and how fast a worker gets
// batches.
#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <memory>

#include "common/files.h"
#include "common/process.h"
#include "data/bench.h"
#include "tools/muster/bench.h"

namespace muster {
namespace {

constexpr const char* kKernelDocs = "/usr/share/doc/linux-doc-6.1/html/_sources";
constexpr double kMegabyte = 1e6;

// Where the kernel's documentation is not installed: as much text, in as many files.
void write_corpus(const std::string& folder) {
  uint32_t state = 1;
  for (int file = 0; file < 3000; ++file) {
    std::string text;
    while (text.size() < 8000) {
      state = state * 1664525U + 1013904223U;
      text += fmt::format("{:x}{}", state >> 20, state % 7 == 0 ? ".\n" : " ");
    }
    std::ofstream(fmt::format("{}/{}.txt", folder, file)) << text;
  }
}

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
  options.sources = {kKernelDocs};
  if (!std::filesystem::exists(kKernelDocs)) {
    write_corpus(made.path());
    options.sources = {made.path()};
  }
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
