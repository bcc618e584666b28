// What a worker writes when it leaves without a coordinator: its part of the state, and the reports
// that nobody may have written down. A coordinator that is started later makes a checkpoint of it
// where all parts are there (coordinator/left_behind.h).
#pragma once

#include <vector>

#include "common/config/config.h"
#include "common/protocol/muster.pb.h"
#include "common/run_dir.h"
#include "worker/elastic/state_piece.h"

namespace muster {

// The units of the model, without making it where it would be computed. `config` is resolved.
std::vector<UnitSpec> planned_units(const Config& config);

// Writes the piece as a shard, and after it PART.farewell, into the folder of its step and
// generation. `reports`: StepReport and EvalReport; those of other generations are left out. Throws
// IoError.
void leave_behind(const RunDir& run, const Config& config, const StatePiece& piece,
                  const std::vector<proto::Envelope>& reports, const Stream& stream = {});

}  // namespace muster
