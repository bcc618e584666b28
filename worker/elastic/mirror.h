// Mirrors: each rank's part of the state also lies in the host memory of another rank, on another
// node where there is one. It is copied and sent in the background of the passes of a step, which
// only read the state.
//
//   mirror.start(step, state, progress);  // the state after `step`; the passes of step + 1 may run
//   mirror.finish();                      // before the update of step + 1 overwrites it
//   mirror.keep(progress);                // both pieces are in the vault
//
// An update has a collective in it, so nobody has overwritten a state unless all have finished:
// either every rank's mirror of it is complete, or nobody is past it.
#pragma once

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "kernels/runtime/runtime.h"
#include "worker/comm/gloo_mesh.h"
#include "worker/elastic/vault.h"

namespace muster {

// Who keeps the mirror of `rank`: a rank as many further as the largest node has ranks, so that
// where ranks of a node follow one another it is on another node. `nodes`: of each rank. -1:
// nobody, in a world of one.
int mirror_holder(const std::vector<std::string>& nodes, int rank);
// Whose mirror `rank` keeps; -1 likewise.
int mirror_ward(const std::vector<std::string>& nodes, int rank);

struct MirrorOptions {
  uint64_t generation = 0;
  int part = 0;     // of the layout, this rank's
  int holder = -1;  // ranks of the mesh
  int ward = -1;
  int ward_part = 0;
  double timeout_s = 60.0;  // for each message
};

class Mirror {
 public:
  // `mesh` has all ranks of the generation. The state lies where `compute`'s device is.
  Mirror(std::shared_ptr<GlooMesh> mesh, const MirrorOptions& options, Vault& vault,
         const Stream& compute);
  // Ends what is under way by aborting the mesh.
  ~Mirror();
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  // Begins, once all that is enqueued on the compute stream has happened. `state` must not be
  // written until finish() has returned. All ranks of the generation mirror the same steps. Where
  // `progress` is known by now, the vault has both pieces as soon as they are complete: a
  // generation that has just lost a member has no other copy until then.
  void start(int64_t step, std::vector<ShardState> state,
             const std::optional<TrainingProgress>& progress);
  // Returns when the own copy is made and sent, and the ward's is here. Throws PeerError or
  // TimeoutError naming the ranks.
  void finish();
  // Puts both pieces of the mirror that is finished into the vault, if they are not there yet.
  void keep(const TrainingProgress& progress);
  // Seconds that the copy to host memory took in the mirror that finished last.
  double copy_seconds() const { return copy_seconds_; }

 private:
  void run();
  void copy_to_host();
  void exchange();

  const std::shared_ptr<GlooMesh> mesh_;
  const MirrorOptions options_;
  Vault& vault_;
  const Stream compute_;
  Event written_;  // the state, on the compute stream
  std::shared_ptr<StatePiece> own_;
  std::shared_ptr<StatePiece> ward_;
  std::vector<ShardState> state_;
  std::optional<TrainingProgress> progress_;
  double copy_seconds_ = 0.0;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool busy_ = false;
  bool stopping_ = false;
  std::exception_ptr error_;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace muster
