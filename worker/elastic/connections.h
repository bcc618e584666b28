// What connects the members of one generation: the mesh over which state is handed over to it, its
// communicators, and the mesh of its mirrors. Made in the background, so that the generation before
// trains meanwhile.
#pragma once

#include <memory>
#include <string>
#include <thread>

#include "common/config/config.h"
#include "common/protocol/assignment.h"
#include "worker/comm/groups.h"
#include "worker/comm/interrupt.h"
#include "worker/coordinator_link.h"

namespace muster {

class GlooMesh;

struct Connections {
  proto::Assignment assignment;
  Place place;  // of this worker in it
  // Ends all of them: fired when the generation is broken off, the run ends, or this worker gives
  // up. In mid-collective it must be, before the tensors go.
  std::shared_ptr<Interrupt> interrupt;
  std::shared_ptr<GlooMesh> handover;  // null: no handover, or this is its only participant
  std::shared_ptr<GroupedCommunicator> communicator;  // null: this member only hands over
  std::shared_ptr<GlooMesh> mirror;                   // null: nobody mirrors
  Interrupt::Handle aborting;                         // the communicator
};

class Preparation {
 public:
  // Begins at once, in a thread of its own. On a GPU the communicators are left to take(): they
  // take memory and the stream of the generation that still trains. All that is referred to must
  // outlive this.
  Preparation(const Config& config, proto::Assignment assignment, CoordinatorLink& link,
              const std::string& member_id, const Stream& stream);
  // What was not taken is given up.
  ~Preparation();
  Preparation(const Preparation&) = delete;
  Preparation& operator=(const Preparation&) = delete;

  const proto::Assignment& assignment() const { return connections_.assignment; }
  int rank() const { return connections_.place.rank; }
  // Waits for them. Throws what ended them: PeerError (Halted), TimeoutError, ConfigError. Once.
  Connections take();

 private:
  void connect();
  void connect_members();
  CommunicatorOptions options() const;

  const Config& config_;
  CoordinatorLink& link_;
  const Stream stream_;
  Connections connections_;
  std::exception_ptr error_;
  bool taken_ = false;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace muster
