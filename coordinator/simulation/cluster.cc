#include "coordinator/simulation/cluster.h"

#include <fmt/format.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "common/hash.h"
#include "coordinator/simulation/history.h"

namespace muster::simulation {

namespace {

// How soon after a process's end others notice: its agent, and those who were connected with it.
constexpr double kEndNoticedS = 0.01;
// A process whose node has lost power keeps its connections for this many heartbeats.
constexpr double kDeadConnection = 5.0;
const ExitStatus kKilled{true, 9};

double cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  constexpr double kNano = 1e-9;
  return static_cast<double>(time.tv_sec) + kNano * static_cast<double>(time.tv_nsec);
}

// What a message says, in a line.
std::string summary(const proto::Envelope& envelope) {
  std::string text = envelope.ShortDebugString();
  constexpr size_t kMost = 160;
  if (text.size() > kMost) text.resize(kMost);
  return text;
}

// In memory where the system offers that: a run writes its journal at every step, and a disk would
// be what is measured.
std::string scratch_base() {
  const std::string memory = "/dev/shm";
  return access(memory.c_str(), W_OK) == 0 ? memory : "";
}

}  // namespace

std::string Trace::to_string() const {
  return fmt::format("{:9.4f} {}{}", time, text, summary(envelope));
}

Cluster::Cluster(const ClusterOptions& options)
    : options_(options),
      dice_(options.seed),
      dir_("muster", scratch_base()),
      run_{dir_.path()},
      collectives_(*this),
      order_(options.config.run.seed, kFingerprint, options.train_samples,
             options.config.data.shuffle),
      samples_(1),
      histories_{kSeedHistory} {
  options_.config.run.dir = dir_.path();
  std::filesystem::create_directories(run_.checkpoints());
  log_ = std::make_unique<RunLog>(run_, options_.config.metrics.debug_samples);
  session_ = std::make_unique<Session>(
      options_.config,
      SessionOptions{
          .expected_workers = options_.expected_workers, .resume_command = "", .run_token = ""},
      log_.get(),
      [this](const std::string& peer, const Message& message) { return send(peer, message); },
      now());
  arm_tick();
}

Cluster::~Cluster() = default;

template <typename P, typename... Arguments>
P* Cluster::add(Arguments&&... arguments) {
  auto process = std::make_unique<P>(*this, std::forward<Arguments>(arguments)...);
  P* added = process.get();
  by_id_[added->id()] = added;
  processes_.push_back(std::move(process));
  return added;
}

// Where bytes count it is as long as real ones.
std::string Cluster::full_id(std::string id) const {
  constexpr size_t kLength = 32;
  if (options_.charge_coordinator) id.resize(kLength, '-');
  return id;
}

Agent* Cluster::add_node(int workers) {
  const int32_t pid = ++next_pid_;
  Agent* agent = add<Agent>(full_id(fmt::format("n{}", pid)), pid, workers);
  agent->start(dice_.uniform(0.0, options_.times.start_s));
  note("starts", *agent);
  return agent;
}

DataService* Cluster::add_data_service(Agent& node) {
  const int32_t pid = ++next_pid_;
  return add<DataService>(proto::ROLE_DATA, full_id(fmt::format("n{}.d{}", node.pid(), pid)), &node,
                          pid);
}

Worker* Cluster::add_worker(Agent& node) {
  const int32_t pid = ++next_pid_;
  return add<Worker>(proto::ROLE_WORKER, full_id(fmt::format("n{}.w{}", node.pid(), pid)), &node,
                     pid);
}

std::vector<Agent*> Cluster::nodes() const {
  std::vector<Agent*> found;
  for (const auto& process : processes_) {
    if (process->running() && process->role() == proto::ROLE_NODE) {
      found.push_back(static_cast<Agent*>(process.get()));
    }
  }
  return found;
}

std::vector<Worker*> Cluster::workers() const {
  std::vector<Worker*> found;
  for (const auto& process : processes_) {
    if (process->running() && process->role() == proto::ROLE_WORKER) {
      found.push_back(static_cast<Worker*>(process.get()));
    }
  }
  return found;
}

void Cluster::kill(Process& process, const std::string& why) {
  if (!process.running()) return;
  note("is killed: " + why, process);
  process.end(kKilled);
}

void Cluster::cut_power(Agent& node) {
  note("loses power", node);
  node.disturb();
  silent_[&node] = true;
  for (Process* child : node.children()) silent_[child] = true;
  node.end(kKilled);
}

void Cluster::stop_for(Process& process, double seconds) {
  note(fmt::format("stops for {:.2f} s", seconds), process);
  process.disturb();
  process.stop_for(seconds);
}

void Cluster::cut_for(Agent& node, double seconds) {
  if (node.cut()) return;
  note(fmt::format("is cut off for {:.2f} s", seconds), node);
  node.set_cut();
  node.disturb();
  queue_.at(now() + seconds, [this, &node] {
    note("is connected again", node);
    node.mend();
  });
}

void Cluster::stop_coordinator_for(double seconds) {
  traces_.push_back({now(), fmt::format("the coordinator stops for {:.2f} s", seconds), {}});
  stopped_until_ = now() + seconds;
}

void Cluster::order(proto::Envelope envelope) {
  if (now() < stopped_until_) {
    return queue_.at(stopped_until_, [this, envelope] { order(envelope); });
  }
  traces_.push_back({now(), "order: ", envelope});
  run_session([&] { session_->handle("observer", envelope, now()); });
}

void Cluster::on_end(Process& process) {
  if (!process.status().ok()) note(process.status().to_string(), process);
  collectives_.lost(process);
  if (process.role() == proto::ROLE_NODE) {
    // PR_SET_PDEATHSIG.
    for (Process* child : static_cast<Agent&>(process).children()) child->end(kKilled);
  } else if (process.agent()->running()) {
    process.agent()->after(dice_.uniform(0.0, kEndNoticedS),
                           [&process] { process.agent()->on_child_end(process); });
  }
}

bool Cluster::run_next() {
  if (session_->over() || queue_.empty()) return false;
  queue_.run_next();
  return true;
}

void Cluster::run_until(double time) {
  while (!session_->over() && !queue_.empty() && queue_.next_time() <= time) queue_.run_next();
}

double Cluster::delay() {
  const NetworkOptions& network = options_.network;
  double seconds = network.latency_s * dice_.uniform(0.8, 1.5);
  if (network.slow_share > 0 && dice_.chance(network.slow_share)) {
    seconds += dice_.uniform(0.0, network.slow_s);
  }
  return seconds;
}

void Cluster::to_coordinator(Process& process, const proto::Envelope& envelope) {
  Agent* node = process.agent() == nullptr ? static_cast<Agent*>(&process) : process.agent();
  const bool beat = envelope.has_heartbeat();
  const bool doomed = !beat && ++messages_ == kill_at_message;
  if (doomed && options_.seed % 2 == 1) return kill(process, "before " + summary(envelope));
  const auto transmit = [this, &process, envelope] {
    const int copies =
        !envelope.has_heartbeat() && dice_.chance(options_.network.duplicate_share) ? 2 : 1;
    for (int copy = 0; copy < copies; ++copy) {
      double& up = lanes_[&process].up;
      up = std::max(up, now() + delay());
      Incoming incoming{&process, {}, {}};
      if (options_.charge_coordinator) {
        envelope.SerializeToString(&incoming.bytes);
      } else {
        incoming.envelope = envelope;
      }
      queue_.at(up, [this, incoming] { arrive(incoming); });
    }
  };
  if (node->cut()) {
    node->hold(transmit);
  } else {
    transmit();
  }
  if (doomed) kill(process, "after " + summary(envelope));
}

void Cluster::arrive(Incoming incoming) {
  inbox_.push_back(std::move(incoming));
  if (serving_) return;
  serving_ = true;
  const double free = std::max(busy_until_, stopped_until_);
  if (now() >= free) return serve();
  queue_.at(free, [this] { serve(); });
}

void Cluster::serve() {
  if (now() < stopped_until_) return queue_.at(stopped_until_, [this] { serve(); });
  Incoming incoming = std::move(inbox_.front());
  inbox_.pop_front();
  const std::string& peer = incoming.process->id();
  proto::Envelope* envelope = &incoming.envelope;
  proto::Envelope decoded;
  run_session([&] {
    if (options_.charge_coordinator) {
      decoded.ParseFromString(incoming.bytes);
      envelope = &decoded;
    }
    if (!envelope->has_heartbeat() && !options_.charge_coordinator) {
      traces_.push_back({now(), peer + " > ", *envelope});
    }
    session_->handle(peer, *envelope, now());
  });
  if (watch.received) watch.received(*incoming.process, *envelope);
  serving_ = !inbox_.empty();
  if (serving_) queue_.at(busy_until_, [this] { serve(); });
}

// Lets the session do something, and then sends what it sends.
void Cluster::run_session(const std::function<void()>& call) {
  const double before = options_.charge_coordinator ? cpu_seconds() : 0.0;
  call();
  session_->tick(now());
  const double took = options_.charge_coordinator ? cpu_seconds() - before : 0.0;
  cpu_s_ += took;
  double departure = now() + took;
  busy_until_ = departure;
  for (const Outgoing& out : std::exchange(outbox_, {})) {
    // One after the other through the coordinator's link.
    departure += static_cast<double>(out.bytes) / options_.network.bandwidth;
    bytes_ += static_cast<int64_t>(out.bytes);
    if (watch.sent) watch.sent(*out.process, out.message.envelope(), departure);
    deliver(*out.process, out.message, departure, out.bytes);
  }
  if (!options_.charge_coordinator) check_session();
  while (traces_.size() > options_.kept_traces) traces_.pop_front();
  arm_tick();
}

void Cluster::arm_tick() {
  const double due = std::max({session_->next_tick(), now() + 1e-6, stopped_until_});
  if (session_->over() || (armed_ > now() && armed_ <= due)) return;
  armed_ = due;
  queue_.at(due, [this, due] {
    if (armed_ != due) return;
    armed_ = -1.0;
    if (now() < stopped_until_) {
      arm_tick();
    } else if (!session_->over()) {
      run_session([] {});
    }
  });
}

bool Cluster::send(const std::string& peer, const Message& message) {
  const proto::Envelope& envelope = message.envelope();
  const auto found = by_id_.find(peer);
  if (found == by_id_.end()) {
    if (!envelope.has_heartbeat()) traces_.push_back({now(), peer + " < ", envelope});
    return true;
  }
  Process& process = *found->second;
  if (!options_.charge_coordinator) check_sent(process, envelope);
  if (envelope.has_assignment()) record(message);
  if (!process.running()) {
    const double beats = kDeadConnection * options_.config.elastic.heartbeat_s;
    const double open = silent_.contains(&process) ? beats : kEndNoticedS;
    return now() < process.ended_at() + open;
  }
  size_t bytes = 0;
  if (options_.charge_coordinator) {
    bytes = message.bytes().size();
  } else if (!envelope.has_heartbeat()) {
    traces_.push_back({now(), peer + " < ", envelope});
  }
  outbox_.push_back({&process, message, bytes});
  return true;
}

void Cluster::deliver(Process& process, const Message& message, double departure, size_t bytes) {
  Agent* node = process.agent() == nullptr ? static_cast<Agent*>(&process) : process.agent();
  auto transmit = [this, &process, departure, bytes, message] {
    double& down = lanes_[&process].down;
    const double leaves = std::max(departure, now());
    down =
        std::max(down, leaves + delay() + static_cast<double>(bytes) / options_.network.bandwidth);
    queue_.at(down, [&process, message] { process.receive(message); });
  };
  if (node->cut()) {
    node->hold(std::move(transmit));
  } else {
    transmit();
  }
}

void Cluster::record(const Message& message) {
  const proto::Assignment& assignment = message.envelope().assignment();
  std::shared_ptr<Roster>& roster = rosters_[assignment.generation()];
  if (roster) return;
  roster = std::make_shared<Roster>(message);
  if (!assignment.prepare()) committed_ = std::min(committed_, assignment.resume_step());
  std::vector<Process*> all;
  for (const auto& member : assignment.members()) {
    Process* process = by_id_.at(member.member_id());
    roster->places.emplace(process, all.size());
    all.push_back(process);
  }
  std::vector<Process*> members(all.begin(), all.begin() + assignment.world_size());
  roster->mirror_shift = mirror_shift(members);
  roster->members = std::make_shared<const std::vector<Process*>>(std::move(members));
  roster->participants = std::make_shared<const std::vector<Process*>>(std::move(all));
}

std::shared_ptr<const Roster> Cluster::roster(uint64_t generation) const {
  return rosters_.at(generation);
}

// Every new rank receives its part, and every old one gives its own away.
double Cluster::exchange_s(const Roster& roster) const {
  const int from = std::max(1, roster.assignment().handover().holders_size());
  const int to = std::max(1, roster.assignment().world_size());
  return options_.times.state_bytes / std::min(from, to) / options_.network.bandwidth +
         options_.network.latency_s;
}

void Cluster::save_shard(proto::ShardSaved* saved, int world, uint64_t history) {
  const std::string folder = run_.partial_checkpoint(saved->step());
  std::filesystem::create_directories(folder);
  const std::string content = to_hex(history);
  saved->set_file(fmt::format("shard-{:05}-of-{:05}", saved->part(), world));
  write_file_atomic(folder + "/" + saved->file(), content);
  saved->set_bytes(static_cast<int64_t>(content.size()));
  saved->set_xxh3(xxh3(content.data(), content.size()));
}

uint64_t Cluster::load_checkpoint(const proto::Assignment& assignment) {
  const auto& path = assignment.checkpoint_path();
  for (const auto& file : std::filesystem::directory_iterator(path)) {
    if (!file.path().filename().string().starts_with("shard-")) continue;
    require(read_file(file.path()) == to_hex(history(assignment.resume_step())),
            fmt::format("{} is not the state of step {}", file.path().string(),
                        assignment.resume_step()));
  }
  return history(assignment.resume_step());
}

const std::vector<int64_t>& Cluster::samples(int64_t step) {
  history(step);
  return samples_[static_cast<size_t>(step)];
}

uint64_t Cluster::history(int64_t step) {
  while (static_cast<int64_t>(histories_.size()) <= step) {
    const auto next = static_cast<int64_t>(histories_.size());
    samples_.push_back(order_.step_samples(next, options_.config.train.global_batch, 0, 1));
    histories_.push_back(next_history(histories_.back(), next, hash_of(samples_.back())));
  }
  return histories_[static_cast<size_t>(step)];
}

void Cluster::on_step_begin(const Worker& worker, int64_t step) {
  if (watch.step_begin) watch.step_begin(worker, step);
}

void Cluster::on_step_end(const Worker& worker, int64_t step) {
  if (watch.step_end) watch.step_end(worker, step);
}

void Cluster::note(const std::string& what, const Process& process) {
  traces_.push_back({now(), process.id() + " " + what, {}});
}

}  // namespace muster::simulation
