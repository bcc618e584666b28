// A worker's side of the data path: asks its node's data service for micro-batches by global sample
// id and reads them in place from the shared ring. One object belongs to one thread.
//
//   DataClient data({.endpoint = …, .member_id = …, .slots = 4, .micro_batch = 8,
//                    .sequence_length = 256}, Deadline::after(10));
//   data.request(Split::kTrain, ids);                     // as many ahead as there are slots
//   const Batch& batch = data.next(Deadline::after(60));  // in the order of the requests
//   … use batch …
//   data.release(batch);                                  // its slot is free again
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "common/deadline.h"
#include "data/batch.h"

namespace muster {

struct Security;

// Which of the two token streams a sample id counts in.
enum class Split : uint8_t { kTrain, kHeldOut };

struct DataClientOptions {
  std::string endpoint;         // DatasetReport.endpoint
  std::string member_id;        // of the worker; a second client of the same id replaces the first
  int slots = 4;                // micro-batches in flight or in use at a time
  int64_t micro_batch = 8;      // most samples of one request
  int64_t sequence_length = 0;  // must be the run's train.sequence_length
  // Where the service is that takes the place of the one at `old`; waits until that is known, and
  // throws what ends the wait. With it `endpoint` is not used: the client asks, with "", where to
  // begin, and goes over when its service dies. Without it a dead service is an error.
  std::function<std::string(const std::string& old, Deadline)> successor = nullptr;
  // Called now and then while next() waits; throws what ends the wait.
  std::function<void()> check = nullptr;
};

class DataClient {
 public:
  // Connects, opens the ring and maps it. Throws TimeoutError naming the data service, PeerError
  // when it refuses (wrong key, another sequence length, ring too large).
  DataClient(const DataClientOptions& options, const Security& security, Deadline deadline);
  ~DataClient();
  DataClient(const DataClient&) = delete;
  DataClient& operator=(const DataClient&) = delete;

  // Slots that are neither requested nor held; request() needs one.
  int free_slots() const;
  // Batches requested and not yet returned by next().
  int outstanding() const;
  // Asks for one micro-batch of 1 to micro_batch samples; returns at once.
  void request(Split split, std::span<const int64_t> ids);
  // The batch of the oldest request; valid until released. Goes over to another service when this
  // one has died and the options say where: what was requested and not returned is asked for again,
  // batches that are held stay as they are. Throws TimeoutError naming the data service, PeerError
  // when it died or handed over a stale slot, DataError with the service's reason when it could not
  // make the batch (that request is then over).
  const Batch& next(Deadline deadline);
  // Gives the batch's slot back. `batch` must be what next() returned.
  void release(const Batch& batch);
  // Seconds that next() has waited for batches that were not ready, since the start.
  double data_wait_s() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace muster
