#include "data/bench.h"

#include <thread>

#include "data/service.h"
#include "data/testing.h"

namespace muster {
namespace {

// A service on a thread in place of a process.
std::shared_ptr<void> start_thread(const std::string& coordinator) {
  return std::shared_ptr<std::jthread>(new std::jthread([coordinator] {
    DataServiceOptions options;
    options.coordinator = coordinator;
    options.handle_signals = false;
    try {
      run_data_service(options);
    } catch (const DataError&) {
      // What the bench throws, too.
    }
  }));
}

TEST(DataBench, MeasuresOnePassOverACorpus) {
  const Corpus corpus;
  for (int i = 0; i < 20; ++i) {
    corpus.add(std::to_string(i) + ".txt.gz", gzipped(some_text(5000, static_cast<uint32_t>(i))));
  }
  DataBenchOptions options;
  options.sources = {corpus.path()};
  options.sequence_length = 64;
  options.start_service = start_thread;
  const DataBenchResult result = bench_data_service(options);
  EXPECT_EQ(result.documents, 20);
  EXPECT_EQ(result.text_bytes, 100'000);
  EXPECT_GT(result.first_start_s, 0);
  EXPECT_GT(result.second_start_s, 0);
  EXPECT_GT(result.in_order_text_bytes_per_s, 0);
  EXPECT_GT(result.shuffled_text_bytes_per_s, 0);
  EXPECT_GT(result.ring_bytes_per_text_byte, 12) << "tokens, targets and positions";
}

TEST(DataBench, PassesOnThatTheSourcesAreUnusable) {
  const Corpus corpus;
  DataBenchOptions options;
  options.sources = {corpus.path("missing")};
  options.start_service = start_thread;
  EXPECT_THROW(bench_data_service(options), DataError);
}

}  // namespace
}  // namespace muster
