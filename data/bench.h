// How fast the data path is, end to end: a service, the protocol, the ring, a client that touches
// every token. The number that matters is text per second against what training consumes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace muster {

struct DataBenchOptions {
  std::vector<std::string> sources;
  int64_t sequence_length = 256;
  int64_t micro_batch = 8;
  int slots = 8;
  // Starts a data service that joins the coordinator at this endpoint, without a run key; the
  // service is over when the last owner of the result drops it.
  std::function<std::shared_ptr<void>(const std::string& coordinator)> start_service;
};

struct DataBenchResult {
  int64_t documents = 0;
  int64_t text_bytes = 0;
  double first_start_s = 0;   // from the start of the process to its report, nothing cached
  double second_start_s = 0;  // the same with the index of the first start
  // One pass over all samples. Bytes of text a second, decoding + packing + handing over:
  double in_order_text_bytes_per_s = 0;  // nothing decoded yet
  double shuffled_text_bytes_per_s = 0;  // decoded files in the cache as far as they fit
  double ring_bytes_per_text_byte = 0;   // what a token takes in the ring
};

// Throws TimeoutError when the service does not come up, DataError when the sources are unusable.
DataBenchResult bench_data_service(const DataBenchOptions& options);

}  // namespace muster
