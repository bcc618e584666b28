#include "coordinator/simulation/collectives.h"

#include <algorithm>
#include <utility>

#include "coordinator/simulation/cluster.h"
#include "coordinator/simulation/history.h"

namespace muster::simulation {

namespace {

// Between a peer's loss and the error of who waits for it.
constexpr double kDetectionS = 0.005;
// Meshes of so many generations are remembered.
constexpr size_t kKeptMeshes = 8;

const Agent* node_of(const Process& process) {
  return process.agent();
}

}  // namespace

bool Collectives::out_of_reach(const Process& process, const Participants& participants) {
  return node_of(process)->cut() &&
         std::any_of(participants->begin(), participants->end(),
                     [&](const Process* other) { return node_of(*other) != node_of(process); });
}

void Collectives::arrive(Process& process, const MeshKey& mesh, const std::string& operation,
                         const Participants& participants, size_t index, double duration_s,
                         Contribution contribution, Done done) {
  if (out_of_reach(process, participants)) {
    process.agent()->hold([=, this, &process, contribution = std::move(contribution)]() mutable {
      if (!process.running()) return;
      arrive(process, mesh, operation, participants, index, duration_s, std::move(contribution),
             done);
    });
    return;
  }
  Mesh& here = meshes_[mesh];
  here.joined[&process] = true;
  if (meshes_.size() > kKeptMeshes) meshes_.erase(meshes_.begin());
  std::shared_ptr<Operation>& slot = here.operations[operation];
  if (!slot) {
    slot = std::make_shared<Operation>();
    slot->participants = participants;
    slot->contributions.resize(participants->size());
    slot->waiting.resize(participants->size());
    const double patience = cluster_.options().config.elastic.collective_timeout_s;
    cluster_.queue().at(cluster_.now() + patience, [this, weak = std::weak_ptr<Operation>(slot)] {
      const auto late = weak.lock();
      if (late && !late->complete) fail(late, nullptr);
    });
  }
  const std::shared_ptr<Operation> mine = slot;
  mine->waiting[index] = std::move(done);
  mine->contributions[index] = std::move(contribution);
  if (here.broken) return tell(process, kDetectionS, mine, index, false);
  if (++mine->arrived == participants->size()) complete(mesh, operation, mine, duration_s);
}

void Collectives::complete(const MeshKey& key, const std::string& name,
                           const std::shared_ptr<Operation>& operation, double duration_s) {
  operation->complete = true;
  std::vector<int64_t> samples;
  for (const Contribution& one : operation->contributions) {
    samples.insert(samples.end(), one.samples.begin(), one.samples.end());
    for (const auto& [part, history] : one.pieces) operation->gathered.pieces[part] = history;
  }
  operation->gathered.samples = hash_of(samples);
  operation->contributions.clear();
  const Participants participants = operation->participants;
  double last = 0.0;
  for (size_t i = 0; i < participants->size(); ++i) {
    const double delay = duration_s * cluster_.dice().uniform(1.0, 1.1);
    last = std::max(last, delay);
    tell(*(*participants)[i], delay, operation, i, true);
  }
  // Until then it may still break for some.
  cluster_.queue().at(cluster_.now() + last, [this, key, name] {
    const auto mesh = meshes_.find(key);
    if (mesh != meshes_.end()) mesh->second.operations.erase(name);
  });
}

void Collectives::tell(Process& process, double delay, const std::shared_ptr<Operation>& operation,
                       size_t index, bool ok) {
  process.after(delay, [=, this, &process] {
    // Taken: it was told otherwise in the meantime.
    if (!operation->waiting[index]) return;
    if (out_of_reach(process, operation->participants)) {
      return process.agent()->hold([=, this, &process] { tell(process, 0, operation, index, ok); });
    }
    const Done done = std::exchange(operation->waiting[index], nullptr);
    done(ok ? &operation->gathered : nullptr);
  });
}

void Collectives::fail(const std::shared_ptr<Operation>& operation, const Process* but) {
  for (size_t i = 0; i < operation->waiting.size(); ++i) {
    Process* process = (*operation->participants)[i];
    if (!operation->waiting[i] || process == but) continue;
    // What is complete already arrives at some and not at others.
    if (operation->complete && cluster_.dice().chance(0.5)) continue;
    tell(*process, cluster_.dice().uniform(0.0, kDetectionS), operation, i, false);
  }
}

void Collectives::break_mesh(Mesh& mesh, const Process& by) {
  // Once it is broken nobody begins anything in it, and who waited has been told.
  if (std::exchange(mesh.broken, true)) return;
  for (const auto& [name, operation] : mesh.operations) fail(operation, &by);
}

void Collectives::abort(Process& process, const MeshKey& mesh) {
  const auto found = meshes_.find(mesh);
  if (found == meshes_.end() || !found->second.joined.contains(&process)) return;
  break_mesh(found->second, process);
}

void Collectives::lost(Process& process) {
  for (auto& [key, mesh] : meshes_) {
    if (mesh.joined.contains(&process)) break_mesh(mesh, process);
  }
}

}  // namespace muster::simulation
