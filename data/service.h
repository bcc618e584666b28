// The data service of a node: one process that scans the text sources, reports the dataset to the
// coordinator and fills its workers' rings with micro-batches.
#pragma once

#include <string>

#include "common/transport/transport.h"

namespace muster {

struct DataServiceOptions {
  std::string coordinator;  // endpoint
  Security security;
  std::string member_id;          // "" = a random one
  std::string node_id;            // the node agent's member id
  double connect_timeout_s = 30;  // for the coordinator's Welcome
  bool handle_signals = true;     // SIGTERM and SIGINT end the service; off where it is a thread
};

// Runs until the coordinator says Stop or SIGTERM or SIGINT arrives, and returns 0. On a signal,
// workers that still use their rings are served until they leave, at most
// elastic.shutdown_timeout_s. Throws TimeoutError when the coordinator does not answer or falls
// silent for five heartbeats (it answers each of ours with one of its own), PeerError when it
// refuses us, DataError when the sources are unusable, after the coordinator has been told.
int run_data_service(const DataServiceOptions& options);

}  // namespace muster
