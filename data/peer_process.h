// Another process of this machine that we depend on: is it still there?
#pragma once

#include <sys/types.h>

#include "common/files.h"

namespace muster {

class PeerProcess {
 public:
  // Holds on to the process that has this id now: a later process of the same id is not mistaken
  // for it. Throws PeerError when there is none.
  explicit PeerProcess(pid_t pid);

  pid_t pid() const { return pid_; }
  bool alive() const;

 private:
  pid_t pid_;
  Fd pidfd_;
};

}  // namespace muster
