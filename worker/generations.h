// A worker's way from one generation to the next: what it is assigned to it joins, trains, hands
// over or breaks off, until the run ends.
#pragma once

#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <string>

#include "common/config/config.h"
#include "common/transport/transport.h"
#include "data/client.h"
#include "worker/coordinator_link.h"
#include "worker/device/compute_device.h"
#include "worker/elastic/connections.h"
#include "worker/elastic/vault.h"

namespace muster {

// Where the time of a beginning went, for the log.
class StopWatch {
 public:
  // What came since the last lap, or the start, was `what`.
  void lap(const char* what);
  const std::string& laps() const { return laps_; }  // "memory 0.012 s, state 0.100 s"

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
  std::string laps_;
};

class Generations {
 public:
  // Takes the device for itself: a GPU's context is there before the first assignment. `config` is
  // resolved; all that is referred to must outlive this.
  Generations(const Config& config, std::string member_id, const Security& security, int local_rank,
              CoordinatorLink& link);

  // Throws RunEnded when the coordinator says so, or what keeps this worker from going on. That
  // others do not is no such thing: then it waits for the next generation. Where the coordinator is
  // gone it saves first what it has.
  [[noreturn]] void run();

  // Of the generation that it is in or joins; 0 and -1 before the first.
  uint64_t generation() const { return generation_; }
  int rank() const { return rank_; }

 private:
  [[noreturn]] void take_part_in_all();
  std::unique_ptr<Preparation> next_generation();
  std::unique_ptr<Preparation> prepare(proto::Assignment assignment, bool trains);
  std::unique_ptr<Preparation> take_part(std::unique_ptr<Preparation> preparation);
  bool make_room();
  void rehearse(int world_size);
  std::unique_ptr<Preparation> train(const Connections& connections, StopWatch watch);
  void break_off(const PeerError& error);
  void report_pieces(uint64_t generation);
  void leave_state();
  void connect_data();

  const Config& config_;
  const std::string member_id_;
  const Security security_;
  CoordinatorLink& link_;
  ComputeDevice device_;
  Vault vault_;
  std::shared_ptr<Interrupt> interrupt_;  // of the generation; null before the first
  std::unique_ptr<DataClient> data_;
  uint64_t generation_ = 0;
  int rank_ = -1;
  std::optional<PieceId> trained_;  // its part of the generation that trained last; step 0
  std::future<void> retired_;       // connections of the last generation on their way out
  std::future<void> replaced_;      // and of one that was prepared and never began
};

}  // namespace muster
