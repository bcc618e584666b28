#include "worker/generations.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "common/error.h"
#include "common/logging.h"
#include "common/run_dir.h"
#include "worker/elastic/farewell.h"
#include "worker/elastic/handover.h"
#include "worker/train/memory_plan.h"
#include "worker/train/rehearsal.h"
#include "worker/train/trainer.h"

namespace muster {

namespace {

using Seconds = std::chrono::duration<double>;

StateShape state_shape(const Config& config) {
  return shape_of(planned_units(config),
                  config.precision.moments == "bfloat16" ? DType::kBFloat16 : DType::kFloat32);
}

// What takes a while to go, and nobody waits for.
template <typename T>
std::future<void> end_in_background(Device device, std::unique_ptr<T> last) {
  return std::async(std::launch::async, [device, last = std::move(last)]() mutable {
    use_device(device);
    last.reset();
  });
}

ComputeDevice make_device(const Config& config, int local_rank) {
  const Device place = choose_device(config.run, local_rank);
  return {place, choose_compute_dtype(config, place)};
}

}  // namespace

void StopWatch::lap(const char* what) {
  const auto now = std::chrono::steady_clock::now();
  laps_ += fmt::format("{}{} {:.3f} s", laps_.empty() ? "" : ", ", what,
                       std::chrono::duration<double>(now - last_).count());
  last_ = now;
}

Generations::Generations(const Config& config, std::string member_id, const Security& security,
                         int local_rank, CoordinatorLink& link)
    : config_(config),
      member_id_(std::move(member_id)),
      security_(security),
      link_(link),
      device_(make_device(config, local_rank)),
      vault_(state_shape(config), device_.context().stream.device) {
  device_.configure(config);
}

void Generations::run() {
  try {
    take_part_in_all();
  } catch (const CoordinatorGone&) {
    leave_state();
    throw;
  }
}

void Generations::take_part_in_all() {
  std::unique_ptr<Preparation> next;
  while (true) {
    try {
      if (!next) next = next_generation();
      next = take_part(std::move(next));
    } catch (const PeerError& error) {
      break_off(error);
    }
  }
}

// Waits for the next assignment. What was broken off meanwhile is answered with what is there.
std::unique_ptr<Preparation> Generations::next_generation() {
  while (true) {
    if (const auto halted = link_.take_halt()) report_pieces(*halted);
    if (auto assignment = link_.next_assignment()) {
      return prepare(std::move(*assignment), /*trains=*/false);
    }
  }
}

std::unique_ptr<Preparation> Generations::prepare(proto::Assignment assignment, bool trains) {
  return std::make_unique<Preparation>(config_, std::move(assignment), link_, member_id_,
                                       device_.context().stream, /*alone=*/trains);
}

// Returns the generation that follows, if it is known already.
std::unique_ptr<Preparation> Generations::take_part(std::unique_ptr<Preparation> preparation) {
  const bool joins = generation_ == 0 && preparation->assignment().has_handover();
  generation_ = preparation->assignment().generation();
  rank_ = preparation->rank();
  StopWatch watch;
  if (rank_ >= 0) {
    // One that joins has nothing else on its GPU, and rehearses while it is connected.
    if (!joins) preparation->wait();
    reserve_memory(device_, config_, rank_, preparation->assignment().world_size(),
                   {.connected = !joins && preparation->connected(),
                    .more_communicators = preparation->handover_communicators(),
                    .make_room = [this] { return make_room(); }});
    connect_data();
  }
  watch.lap("memory");
  if (joins && rank_ >= 0) rehearse(preparation->assignment().world_size());
  if (joins) preparation->rehearsed();
  watch.lap("rehearsal");
  if (preparation->assignment().prepare()) {
    preparation->wait();
    preparation->complete();
    preparation->begin_from(link_.go_over(generation_));
  }
  watch.lap("word to go over");
  Connections connections = preparation->take();
  watch.lap("connections");
  interrupt_ = connections.interrupt;
  preparation.reset();
  std::unique_ptr<Preparation> next;
  if (rank_ >= 0) {
    next = train(connections, watch);
  } else {
    hand_over(connections.handover, plan_handover(connections.assignment, 1, member_id_), vault_,
              {}, device_.context(), {.timeout_s = config_.elastic.collective_timeout_s});
  }
  // Taking leave takes a while, during which the next generation can begin.
  retired_ = end_in_background(device_.context().stream.device,
                               std::make_unique<Connections>(std::move(connections)));
  return next;
}

// First the buffers of the last generation's NCCL, then state, which host memory has to hold.
bool Generations::make_room() {
  if (retired_.valid()) {
    retired_.get();
    return true;
  }
  const auto on_gpu = [&](const PieceId& id) {
    const auto piece = vault_.find(id);
    return piece && piece->device().is_cuda();
  };
  const std::vector<PieceId> pieces = vault_.pieces();
  if (std::none_of(pieces.begin(), pieces.end(), on_gpu)) return false;
  vault_.to_host(device_.context().stream);
  return true;
}

// While the others still train: nobody shall wait later for this GPU to load its kernels.
void Generations::rehearse(int world_size) {
  const Stream stream = device_.context().stream;
  if (!stream.device.is_cuda()) return;
  Rehearsal rehearsal(config_, rank_, world_size, device_.context());
  rehearsal.run();
  synchronize(stream);
}

std::unique_ptr<Preparation> Generations::train(const Connections& connections, StopWatch watch) {
  const proto::Assignment& assignment = connections.assignment;
  Trainer trainer(config_, connections, link_, *data_, device_, vault_);
  // Collectives that are under way must end before the buffers of the trainer go.
  struct EndOnException {
    Interrupt& interrupt;
    int outer = std::uncaught_exceptions();
    ~EndOnException() {
      if (std::uncaught_exceptions() > outer) interrupt.fire("this worker leaves in mid-step");
    }
  } end_on_exception{*connections.interrupt};

  watch.lap("trainer");
  Trainer::Loaded loaded{.everywhere = true, .error = {}};
  if (assignment.has_handover()) {
    const int64_t group = shard_group_size(config_.parallel, assignment.world_size());
    trainer.take_over(plan_handover(assignment, static_cast<int>(group), member_id_));
  } else {
    loaded = trainer.load();
  }
  watch.lap("state");
  // NCCL's way out frees memory, which waits for all that the GPU has to do: beside a step it would
  // take as long as that, again and again, and hold it up all the while.
  if (retired_.valid()) retired_.get();
  watch.lap("leaving the last one");
  spdlog::info("generation {}, rank {} begins: {}", assignment.generation(), rank_, watch.laps());
  proto::Envelope envelope;
  auto* ready = envelope.mutable_ready();
  ready->set_generation(assignment.generation());
  ready->set_checkpoint_error(loaded.error);
  ready->set_part(trainer.part());
  ready->set_mirror_ready(trainer.mirror_ready());
  link_.send(std::move(envelope));
  // Where a checkpoint cannot be used the coordinator assigns anew.
  if (!loaded.everywhere) return nullptr;

  trained_ = {assignment.generation(), assignment.world_size(), trainer.part(), 0};
  std::unique_ptr<Preparation> next;
  const Trainer::End end = trainer.run([&] {
    if (!link_.assignment_waits()) return;
    auto newer = link_.next_assignment();
    if (!newer) return;
    auto replaced = std::exchange(next, prepare(std::move(*newer), /*trains=*/true));
    if (replaced) {
      replaced_ = end_in_background(device_.context().stream.device, std::move(replaced));
    }
  });
  return end == Trainer::End::kGoesOver ? std::move(next) : nullptr;
}

// The generation is over because others are: waits for the coordinator's word on it.
void Generations::break_off(const PeerError& error) {
  spdlog::warn("generation {} breaks off: {}", generation_, error.what());
  data_.reset();  // what was requested is of no use any more
  if (link_.replaced(generation_)) return;
  if (!link_.halted(generation_)) {
    proto::Envelope envelope;
    auto* failed = envelope.mutable_worker_failed();
    failed->set_generation(generation_);
    failed->set_rank(rank_);
    failed->set_error(error.what());
    failed->set_peer(true);
    link_.send(std::move(envelope));
  }
  try {
    link_.wait_for_halt(generation_,
                        Deadline::after(Seconds(config_.elastic.collective_timeout_s)));
  } catch (const TimeoutError& late) {
    throw TimeoutError(std::string(error.what()) + "; " + late.what());
  }
}

void Generations::report_pieces(uint64_t generation) {
  proto::Envelope envelope;
  auto* halted = envelope.mutable_halted();
  halted->set_generation(generation);
  for (const PieceId& id : vault_.pieces()) {
    proto::Piece* piece = halted->add_pieces();
    piece->set_generation(id.generation);
    piece->set_world_size(id.world_size);
    piece->set_part(id.part);
    piece->set_step(id.step);
  }
  link_.send(std::move(envelope));
}

void Generations::leave_state() {
  std::shared_ptr<const StatePiece> newest;
  for (const PieceId& id : vault_.pieces()) {
    PieceId part = id;
    part.step = 0;
    if (part == trained_) newest = vault_.find(id);
  }
  if (!newest) return spdlog::warn("nothing is saved: no state is whole here");
  try {
    leave_behind(RunDir{link_.welcome().run_dir()}, config_, *newest, link_.recent_reports(),
                 device_.context().stream);
    spdlog::info("left behind: {}", newest->id().to_string());
  } catch (const IoError& error) {
    spdlog::error("{} is not saved: {}", newest->id().to_string(), error.what());
  }
}

void Generations::connect_data() {
  if (data_) return;
  const auto successor = [this](const std::string& old, Deadline deadline) {
    return link_.data_endpoint_after(old, generation_, deadline);
  };
  data_ = std::make_unique<DataClient>(
      DataClientOptions{.endpoint = {},
                        .member_id = member_id_,
                        .slots = static_cast<int>(config_.data.prefetch) + 1,
                        .micro_batch = config_.train.micro_batch,
                        .sequence_length = config_.train.sequence_length,
                        .successor = successor,
                        .check =
                            [this] {
                              if (interrupt_) interrupt_->check();
                            }},
      security_, Deadline::after(Seconds(config_.elastic.join_timeout_s)));
}

}  // namespace muster
