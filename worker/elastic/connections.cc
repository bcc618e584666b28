#include "worker/elastic/connections.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kernels/runtime/runtime.h"
#include "worker/comm/gloo_mesh.h"

namespace muster {

namespace {

constexpr double kCoordinatorFirstS = 10.0;

}  // namespace

Preparation::Preparation(const Config& config, proto::Assignment assignment, CoordinatorLink& link,
                         const std::string& member_id, const Stream& stream, bool alone)
    : config_(config), link_(link), stream_(stream) {
  connections_.assignment = std::move(assignment);
  connections_.place = place_of(member_id, connections_.assignment);
  connections_.interrupt = Interrupt::make();
  link_.interrupt_on_halt(this->assignment().generation(), connections_.interrupt);
  thread_ = std::thread([this, alone] {
    try {
      use_device(stream_.device);
      connect(alone);
    } catch (...) {
      error_ = std::current_exception();
    }
    // What has failed shows as the generation begins.
    if (alone) say_prepared(/*complete=*/true, /*crowded=*/!connected_);
    said_complete_ = alone;
  });
}

void Preparation::rehearsed() {
  say_prepared(/*complete=*/false, /*crowded=*/false);
}

void Preparation::complete() {
  if (error_) std::rethrow_exception(error_);
  if (std::exchange(said_complete_, true)) return;
  say_prepared(/*complete=*/true, /*crowded=*/!connected_);
}

void Preparation::say_prepared(bool complete, bool crowded) const {
  if (!assignment().prepare()) return;
  proto::Envelope envelope;
  envelope.mutable_prepared()->set_generation(assignment().generation());
  envelope.mutable_prepared()->set_complete(complete);
  envelope.mutable_prepared()->set_crowded(crowded);
  link_.send(std::move(envelope));
}

Preparation::~Preparation() {
  if (!taken_) {
    const std::string reason = "this worker does not join the generation";
    link_.give_up(assignment().generation(), reason);
    connections_.interrupt->fire(reason);
  }
  if (thread_.joinable()) thread_.join();
}

void Preparation::wait() {
  if (thread_.joinable()) thread_.join();
}

int Preparation::handover_communicators() const {
  const bool leavers = assignment().members_size() > assignment().world_size();
  return hands_over() && over_nccl() && leavers ? 1 : 0;
}

// Else by way of host memory, over the mesh.
bool Preparation::over_nccl() const {
  return stream_.device.is_cuda() && config_.parallel.backend != "single";
}

Connections Preparation::take() {
  wait();
  if (error_) std::rethrow_exception(error_);
  if (!connected_) connect_devices();
  connections_.interrupt->check();
  taken_ = true;
  return std::move(connections_);
}

CommunicatorOptions Preparation::options() const {
  return {.rank = rank(),
          .world_size = assignment().world_size(),
          .backend = config_.parallel.backend,
          .interface_name = config_.parallel.interface,
          .route_to = link_.coordinator_host(),
          .store_prefix = fmt::format("{}/", assignment().generation()),
          .names = {},
          .timeout_s = config_.elastic.collective_timeout_s,
          // The others may be in a long step. Of a generation that is prepared the coordinator
          // finds out first who holds it up.
          .rendezvous_timeout_s =
              std::max(config_.elastic.join_timeout_s, config_.elastic.collective_timeout_s) +
              (assignment().prepare() ? kCoordinatorFirstS : 0.0),
          .interrupt = connections_.interrupt,
          .stream = stream_};
}

CommunicatorOptions Preparation::handover_options() const {
  CommunicatorOptions handover = options();
  handover.rank = connections_.place.index;
  handover.world_size = assignment().members_size();
  handover.store_prefix += "handover/";
  return handover;
}

bool Preparation::hands_over() const {
  return assignment().has_handover() && assignment().members_size() > 1;
}

void Preparation::connect(bool alone) {
  if (connections_.place.index < 0) {
    throw PeerError(
        fmt::format("this worker has no part in generation {}", assignment().generation()));
  }
  if (hands_over()) {
    connections_.handover.mesh = std::make_shared<GlooMesh>(handover_options(), link_);
  }
  if (rank() >= 0 && assignment().world_size() > 1 && config_.elastic.mirror_every != 0) {
    CommunicatorOptions mirror = options();
    mirror.store_prefix += "mirror/";
    connections_.mirror = std::make_shared<GlooMesh>(mirror, link_);
  }
  const bool later = crowded();
  // The others' GPUs wait for this one's, which may have to wait for the step that is the last.
  if (stream_.device.is_cuda() && alone) say_prepared(/*complete=*/false, later);
  if (!later) connect_devices();
}

// NCCL's buffers would not fit beside what the GPU holds now.
bool Preparation::crowded() const {
  constexpr size_t kEnough = size_t{4} << 30;
  return stream_.device.is_cuda() && free_memory(stream_.device) < kEnough;
}

void Preparation::connect_devices() {
  if (rank() >= 0) {
    const auto group = shard_group_size(config_.parallel, assignment().world_size());
    connections_.communicator =
        std::make_shared<GroupedCommunicator>(options(), static_cast<int>(group), link_);
    abort_in_time(connections_.communicator);
  }
  if (hands_over() && over_nccl()) {
    // Where nobody leaves, those who take part are the members.
    connections_.handover.gpus = connections_.communicator;
    if (handover_communicators() > 0) {
      CommunicatorOptions handover = handover_options();
      handover.store_prefix += "gpus/";
      connections_.handover.gpus = make_communicator(handover, link_);
      abort_in_time(connections_.handover.gpus);
    }
  }
  connected_ = true;
}

void Preparation::abort_in_time(const std::shared_ptr<Communicator>& communicator) {
  connections_.aborting.push_back(connections_.interrupt->on_fire(
      [communicator](const std::string& reason) { communicator->abort(reason); }));
}

}  // namespace muster
