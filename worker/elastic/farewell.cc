#include "worker/elastic/farewell.h"

#include <fmt/format.h>

#include "common/arena.h"
#include "common/files.h"

namespace muster {

std::vector<UnitSpec> planned_units(const Config& config) {
  const auto arena = Arena::plan();
  const ComputeContext nowhere{.stream = {.device = Device::plan()}, .allocator = arena.get()};
  return Model(config.model, config.train.sequence_length, nowhere).units();
}

void leave_behind(const RunDir& run, const Config& config, const StatePiece& piece,
                  const std::vector<proto::Envelope>& reports, const Stream& stream) {
  const PieceId& id = piece.id();
  const std::vector<UnitSpec> units = planned_units(config);
  const std::string folder = run.left_behind(id.step, id.generation);
  const SavedShard shard = save_shard(folder, id.part, id.world_size, units, piece.state(), stream);

  proto::Farewell farewell;
  farewell.set_world_size(id.world_size);
  proto::ShardSaved& saved = *farewell.mutable_saved();
  saved.set_generation(id.generation);
  saved.set_rank(id.part);
  saved.set_part(id.part);
  saved.set_step(id.step);
  saved.set_file(shard.file);
  saved.set_bytes(shard.bytes);
  saved.set_xxh3(shard.xxh3);
  saved.set_manifest_json(manifest_json(config.model, units, id.world_size, piece.progress));
  for (const proto::Envelope& envelope : reports) {
    if (envelope.step_report().generation() == id.generation) {
      *farewell.add_steps() = envelope.step_report();
    } else if (envelope.eval_report().generation() == id.generation) {
      *farewell.add_evaluations() = envelope.eval_report();
    }
  }
  write_file_atomic(fmt::format("{}/{}.farewell", folder, id.part), farewell.SerializeAsString());
}

}  // namespace muster
