// Mirrors: each rank's part of the state also lies in the host memory of another rank, on another
// node where there is one. It is copied and sent in the background of the passes of a step, which
// only read the state.
//
//   mirror.start(step, state, progress);  // the state after `step`; the passes of step + 1 may run
//   mirror.finish(Until::kSent);          // before the update of step + 1 overwrites it
//   mirror.keep(progress);                // both pieces are in the vault
//
// An update has a collective in it, so nobody has overwritten a state unless all have finished:
// either every rank's mirror of it is complete, or nobody is past it. With Until::kCopied the
// update waits for the own copy alone, and the pieces are sent behind the steps that follow; then
// only word of all ranks' mirrored() tells that the mirror is complete.
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

  // Begins, once all that is enqueued on the compute stream has happened, and the mirror before is
  // finished. `state` must not be written until finish() has returned. All ranks of the generation
  // mirror the same steps. Where `progress` is known by now, the vault has each piece as soon as it
  // is complete: a generation that has just lost a member has no other copy until then.
  void start(int64_t step, std::vector<ShardState> state,
             const std::optional<TrainingProgress>& progress);
  // kCopied: the own copy is made. kSent: it is with its holder too, and the ward's is here.
  enum class Until { kCopied, kSent };
  // Throws PeerError or TimeoutError naming the ranks.
  void finish(Until until);
  // Throws likewise what has befallen a mirror behind the steps.
  void check();
  // Of the mirror that was started last: its pieces go into the vault once they are complete.
  void keep(const TrainingProgress& progress);
  // The newest step of which the vault has got both pieces.
  std::optional<int64_t> mirrored() const;
  // Seconds that the copy to host memory, and the sending, took in the mirror that came to that
  // last.
  double copy_seconds() const;
  double sent_seconds() const;

 private:
  void run();
  void copy_to_host(const StatePiece& own);
  void exchange(const StatePiece& own, const StatePiece& ward);
  void reach(Until done, double seconds);
  void put();

  const std::shared_ptr<GlooMesh> mesh_;
  const MirrorOptions options_;
  Vault& vault_;
  const Stream compute_;
  Event written_;                  // the state, on the compute stream
  std::vector<ShardState> state_;  // the thread's while it is busy

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Until they are in the vault.
  std::shared_ptr<StatePiece> own_;
  std::shared_ptr<StatePiece> ward_;
  bool busy_ = false;
  bool stopping_ = false;
  bool copied_ = false;
  bool sent_ = false;
  std::optional<TrainingProgress> progress_;
  std::optional<int64_t> mirrored_;
  double copy_seconds_ = 0.0;
  double sent_seconds_ = 0.0;
  std::exception_ptr error_;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace muster
