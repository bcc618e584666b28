#include "worker/elastic/handover.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>

#include "common/error.h"
#include "common/protocol/assignment.h"
#include "kernels/runtime/runtime.h"

namespace muster {
namespace {

// Participants may still train the steps that they were handed before the change: who is late is
// the coordinator's to judge, and an interrupt ends the wait.
constexpr std::chrono::hours kUntilInterrupted(24 * 365);

// What goes from one process to another in one window, in the order in which both make it up.
struct Message {
  std::vector<Transfer> transfers;
  size_t bytes = 0;
  size_t at = 0;  // in the staging memory
};

class Mover {
 public:
  Mover(const HandoverLinks& links, const HandoverPlan& plan, const Vault& vault,
        const std::vector<ShardState>& target, const ComputeContext& context,
        const HandoverOptions& options)
      : mesh_(links.mesh.get()),
        gpus_(links.gpus.get()),
        plan_(plan),
        shape_(vault.shape()),
        target_(target),
        stream_(context.stream),
        options_(options),
        pieces_(plan.holders.size()) {
    for (int part = 0; part < plan.old_world(); ++part) {
      if (plan.holders[part] != plan.self) continue;
      const PieceId id{plan.generation, plan.old_world(), part, plan.step};
      pieces_[part] = vault.find(id);
      if (!pieces_[part]) {
        throw PeerError("handover: this worker does not hold " + id.to_string());
      }
    }
    const auto bytes = options.window * static_cast<int64_t>(shape_.bytes_per_element());
    if (mesh_ == nullptr) return;
    // What goes over the mesh passes through host memory.
    Allocator& staging = gpus_ != nullptr ? *context.allocator : pinned_allocator();
    outgoing_ = Tensor({bytes}, DType::kUInt8, staging);
    incoming_ = Tensor({bytes}, DType::kUInt8, staging);
  }

  void move_unit(int unit) {
    const int64_t numel = shape_.units[unit];
    const std::vector<Transfer> transfers =
        plan_transfers(numel, plan_.old_world(), plan_.new_world());
    size_t next = 0;
    for (int64_t begin = 0; begin < numel; begin += options_.window) {
      const int64_t end = std::min(begin + options_.window, numel);
      std::vector<Transfer> window;
      for (; next < transfers.size() && transfers[next].range.begin < end; ++next) {
        window.push_back(transfers[next]);
        window.back().range.begin = std::max(transfers[next].range.begin, begin);
        window.back().range.end = std::min(transfers[next].range.end, end);
        if (transfers[next].range.end > end) break;  // the rest of it is of the next window
      }
      move_window(unit, window);
    }
  }

  // All that was moved is where it belongs.
  void settle() {
    synchronize(stream_);
    if (gpus_ != nullptr) gpus_->check_alive();
  }

  // Everybody to everybody: nobody begins, or leaves, before all have come so far.
  TrainingProgress meet(const char* what, Deadline deadline) {
    const TrainingProgress* known = nullptr;
    if (const auto& piece = pieces_[0]) known = &piece->progress;
    if (mesh_ == nullptr) return *known;
    const TrainingProgress mine = known != nullptr ? *known : TrainingProgress();
    std::vector<TrainingProgress> all(plan_.participants);
    all[plan_.self] = mine;
    Exchange exchange(*mesh_, what);
    for (int peer = 0; peer < plan_.participants; ++peer) {
      if (peer == plan_.self) continue;
      exchange.receive(peer, &all[peer], sizeof(mine));
      exchange.send(peer, &mine, sizeof(mine));
    }
    exchange.start();
    exchange.finish(deadline);
    return all[plan_.holders[0]];
  }

  Deadline patience() const {
    return Deadline::after(std::chrono::duration<double>(options_.timeout_s));
  }

 private:
  void move_window(int unit, const std::vector<Transfer>& transfers) {
    std::map<int, Message> to;
    std::map<int, Message> from;
    for (const Transfer& transfer : transfers) {
      const int sender = plan_.holders[transfer.from_rank];
      const int receiver = plan_.owners[transfer.to_rank];
      const size_t bytes = static_cast<size_t>(transfer.range.size()) * shape_.bytes_per_element();
      const auto add = [&](Message& message) {
        message.transfers.push_back(transfer);
        message.bytes += bytes;
      };
      if (sender == plan_.self && receiver == plan_.self) {
        copy_own(unit, transfer);
      } else if (sender == plan_.self) {
        add(to[receiver]);
      } else if (receiver == plan_.self) {
        add(from[sender]);
      }
    }
    if (mesh_ == nullptr) return;
    std::vector<Parcel> outgoing;
    std::vector<Parcel> incoming;
    size_t at = 0;
    for (auto& [peer, message] : to) {
      pack(unit, message, at);
      outgoing.push_back({peer, staging(outgoing_, at, message.bytes)});
      at += message.bytes;
    }
    at = 0;
    for (auto& [peer, message] : from) {
      message.at = at;
      incoming.push_back({peer, staging(incoming_, at, message.bytes)});
      at += message.bytes;
    }
    exchange(outgoing, incoming);
    for (const auto& [peer, message] : from) unpack(unit, message);
  }

  void exchange(const std::vector<Parcel>& outgoing, const std::vector<Parcel>& incoming) {
    if (gpus_ != nullptr) {
      // All of it in the order of the stream, which nobody waits for.
      gpus_->exchange(outgoing, incoming)->wait(stream_);
      return;
    }
    synchronize(stream_);  // what was packed is there, and what came before is unpacked
    Exchange exchange(*mesh_, "handover");
    for (const auto& [peer, view] : outgoing) exchange.send(peer, view.raw(), view.bytes());
    for (const auto& [peer, view] : incoming) exchange.receive(peer, view.raw(), view.bytes());
    exchange.start();
    exchange.finish(patience());
  }

  // Of one piece's or the target's entry for the unit, the views of a transfer's range.
  static std::vector<TensorView> cut(const ShardState& state, Range range) {
    const int64_t begin = range.begin - state.range.begin;
    const int64_t end = range.end - state.range.begin;
    return {state.weight.slice(begin, end), state.m.slice(begin, end), state.v.slice(begin, end)};
  }
  std::vector<TensorView> source(int unit, const Transfer& transfer) const {
    return cut(pieces_[transfer.from_rank]->state()[unit], transfer.range);
  }
  std::vector<TensorView> destination(int unit, const Transfer& transfer) const {
    return cut(target_[unit], transfer.range);
  }

  void copy_own(int unit, const Transfer& transfer) const {
    const auto from = source(unit, transfer);
    const auto to = destination(unit, transfer);
    for (size_t kind = 0; kind < to.size(); ++kind) copy(stream_, to[kind], from[kind]);
  }

  void pack(int unit, const Message& message, size_t at) const {
    for (const Transfer& transfer : message.transfers) {
      for (const TensorView& view : source(unit, transfer)) {
        copy(stream_, staging(outgoing_, at, view.bytes()), as_bytes(view));
        at += view.bytes();
      }
    }
  }

  void unpack(int unit, const Message& message) const {
    size_t at = message.at;
    for (const Transfer& transfer : message.transfers) {
      for (const TensorView& view : destination(unit, transfer)) {
        copy(stream_, as_bytes(view), staging(incoming_, at, view.bytes()));
        at += view.bytes();
      }
    }
  }

  static TensorView staging(const Tensor& memory, size_t at, size_t bytes) {
    return memory.view().slice(static_cast<int64_t>(at), static_cast<int64_t>(at + bytes));
  }

  GlooMesh* const mesh_;
  Communicator* const gpus_;
  const HandoverPlan& plan_;
  const StateShape& shape_;
  const std::vector<ShardState>& target_;
  const Stream stream_;
  const HandoverOptions& options_;
  std::vector<std::shared_ptr<const StatePiece>> pieces_;  // by old part; null: another's
  Tensor outgoing_;                                        // [a window] uint8
  Tensor incoming_;
};

}  // namespace

HandoverPlan plan_handover(const proto::Assignment& assignment, int shard_group,
                           const std::string& member_id) {
  const proto::Handover& handover = assignment.handover();
  const int participants = assignment.members_size();
  const int world = assignment.world_size();
  HandoverPlan plan{.generation = handover.generation(),
                    .step = assignment.resume_step(),
                    .self = place_of(member_id, assignment).index,
                    .participants = participants,
                    .holders = {handover.holders().begin(), handover.holders().end()},
                    .owners = {}};
  const bool known = std::all_of(plan.holders.begin(), plan.holders.end(),
                                 [&](int holder) { return holder >= 0 && holder < participants; });
  if (plan.self < 0 || !known || plan.holders.empty() || world < 1 || world > participants) {
    throw PeerError(fmt::format(
        "handover to generation {}: its {} members do not fit a world of {} and {} holders, or "
        "this worker is not one of them",
        assignment.generation(), participants, world, plan.holders.size()));
  }
  plan.owners.resize(static_cast<size_t>(world));
  for (int rank = 0; rank < world; ++rank) {
    const Placement placement{.world_size = world, .rank = rank, .shard_group = shard_group};
    plan.owners[static_cast<size_t>(placement.part())] = rank;
  }
  return plan;
}

TrainingProgress hand_over(const HandoverLinks& links, const HandoverPlan& plan, const Vault& vault,
                           const std::vector<ShardState>& target, const ComputeContext& context,
                           const HandoverOptions& options) {
  MUSTER_CHECK(links.mesh != nullptr || plan.participants == 1);
  Mover mover(links, plan, vault, target, context, options);
  mover.meet("handover: its begin", Deadline::after(kUntilInterrupted));
  for (size_t unit = 0; unit < vault.shape().units.size(); ++unit) {
    mover.move_unit(static_cast<int>(unit));
  }
  mover.settle();
  return mover.meet("handover: its end", mover.patience());
}

}  // namespace muster
