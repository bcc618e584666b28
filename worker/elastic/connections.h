// What connects the members of one generation: the mesh over which state is handed over to it, its
// communicators, and the mesh of its mirrors. Made in the background, so that the generation before
// trains meanwhile.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/config/config.h"
#include "common/protocol/assignment.h"
#include "worker/comm/groups.h"
#include "worker/comm/interrupt.h"
#include "worker/coordinator_link.h"
#include "worker/elastic/handover.h"

namespace muster {

struct Connections {
  proto::Assignment assignment;
  Place place;  // of this worker in it
  // Ends all of them: fired when the generation is broken off, the run ends, or this worker gives
  // up. In mid-collective it must be, before the tensors go.
  std::shared_ptr<Interrupt> interrupt;
  HandoverLinks handover;  // none: no handover, or this is its only participant
  std::shared_ptr<GroupedCommunicator> communicator;  // null: this member only hands over
  std::shared_ptr<GlooMesh> mirror;                   // null: nobody mirrors
  std::vector<Interrupt::Handle> aborting;            // communicators
};

class Preparation {
 public:
  // Begins at once, in a thread of its own; what takes memory of a GPU that has little left beside
  // the generation that still trains is left to take(). All that is referred to must outlive this.
  // Where the assignment says `prepare` the coordinator hears when it is done (Prepared), unless
  // more is to be done (`alone` false): then complete() says so.
  Preparation(const Config& config, proto::Assignment assignment, CoordinatorLink& link,
              const std::string& member_id, const Stream& stream, bool alone);
  // What was not taken is given up.
  ~Preparation();
  Preparation(const Preparation&) = delete;
  Preparation& operator=(const Preparation&) = delete;

  const proto::Assignment& assignment() const { return connections_.assignment; }
  int rank() const { return connections_.place.rank; }
  // Waits until what is made in the background is made, or has failed.
  void wait();
  // After wait(): nothing is left to take().
  bool connected() const { return connected_; }
  // Not alone: what takes long and needs no others is done.
  void rehearsed();
  // After wait(): all that can be done beforehand is done. Throws what ended it, as take().
  void complete();
  // After wait(): the generation goes on from this step (GoOver).
  void begin_from(int64_t step) { connections_.assignment.set_resume_step(step); }
  // Communicators of GPUs that only hand over, beside the generation's own.
  int handover_communicators() const;
  // Waits for them. Throws what ended them: PeerError (Halted), TimeoutError, ConfigError. Once.
  Connections take();

 private:
  void connect(bool alone);
  void say_prepared(bool complete, bool crowded) const;
  bool crowded() const;
  void connect_devices();
  void abort_in_time(const std::shared_ptr<Communicator>& communicator);
  CommunicatorOptions options() const;
  CommunicatorOptions handover_options() const;
  bool hands_over() const;
  bool over_nccl() const;

  const Config& config_;
  CoordinatorLink& link_;
  const Stream stream_;
  Connections connections_;
  std::exception_ptr error_;
  bool connected_ = false;  // all of it
  bool said_complete_ = false;
  bool taken_ = false;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace muster
