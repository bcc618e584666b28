// The data plane of the simulated cluster: operations that complete once all participants have
// come, and fail for all when one of them is lost.
//
// A mesh is a set of processes that are connected with one another; a process belongs to it from
// its first operation there. One that is lost before that is waited for until the time is up.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/simulation/dice.h"

namespace muster::simulation {

class Cluster;
class Process;

// What a participant brings.
struct Contribution {
  std::vector<int64_t> samples;
  std::vector<std::pair<int, uint64_t>> pieces;  // part, history
};
// What all have brought.
struct Gathered {
  uint64_t samples = 0;  // hash of all, in the order of the participants
  std::map<int, uint64_t> pieces;
};

enum class MeshKind { kHandover, kTrain };
using MeshKey = std::pair<uint64_t, MeshKind>;  // generation
using Participants = std::shared_ptr<const std::vector<Process*>>;

class Collectives {
 public:
  // Failed: null.
  using Done = std::function<void(const Gathered*)>;

  explicit Collectives(Cluster& cluster) : cluster_(cluster) {}

  // `index`: of `process` among the participants. `duration_s`: of the operation, once all are
  // there. `done` is called once, from a timer of the process, unless the process ends.
  void arrive(Process& process, const MeshKey& mesh, const std::string& operation,
              const Participants& participants, size_t index, double duration_s,
              Contribution contribution, Done done);
  // The process gives up what is under way in the mesh: the others notice.
  void abort(Process& process, const MeshKey& mesh);
  void lost(Process& process);

 private:
  struct Operation {
    Participants participants;
    std::vector<Contribution> contributions;
    std::vector<Done> waiting;  // by participant; empty: not there yet, or done
    size_t arrived = 0;
    bool complete = false;
    Gathered gathered;
  };
  struct Mesh {
    std::map<std::string, std::shared_ptr<Operation>> operations;
    std::map<const Process*, bool> joined;
    bool broken = false;
  };

  void complete(const MeshKey& key, const std::string& name,
                const std::shared_ptr<Operation>& operation, double duration_s);
  void fail(const std::shared_ptr<Operation>& operation, const Process* but);
  void break_mesh(Mesh& mesh, const Process& by);
  void tell(Process& process, double delay, const std::shared_ptr<Operation>& operation,
            size_t index, bool ok);
  // Cut off from some of the participants.
  static bool out_of_reach(const Process& process, const Participants& participants);

  Cluster& cluster_;
  std::map<MeshKey, Mesh> meshes_;
};

}  // namespace muster::simulation
