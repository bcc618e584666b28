// A real coordinator in a thread, driven over real sockets by scripted members.
#include "coordinator/coordinator.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "common/error.h"
#include "common/files.h"
#include "common/hash.h"
#include "common/protocol/assignment.h"
#include "common/run_dir.h"
#include "coordinator/json_lines.h"

namespace muster {
namespace {

using testing::HasSubstr;
using Json = nlohmann::json;

Deadline soon() {
  return Deadline::after(std::chrono::duration<double>(20));
}

// A member that says hello and then what it is told to.
class Member {
 public:
  Member(const std::string& endpoint, const Security& security, proto::Role role,
         const std::string& id)
      : client_(endpoint, security, "the coordinator"), id_(id) {
    proto::Envelope envelope;
    envelope.mutable_hello()->set_role(role);
    envelope.mutable_hello()->set_member_id(id);
    envelope.mutable_hello()->set_node_id("agent");
    envelope.mutable_hello()->set_host("testhost");
    envelope.mutable_hello()->set_pid(4242);
    envelope.mutable_hello()->set_workers(1);
    welcome_ = client_.call(std::move(envelope), soon()).welcome();
  }
  void send(proto::Envelope envelope) { client_.send(std::move(envelope), soon()); }
  // The next message that is no heartbeat; sends heartbeats meanwhile. Nothing: the run has ended.
  std::optional<proto::Envelope> next() {
    const Deadline deadline = soon();
    while (!deadline.passed() && !stop_) {
      proto::Envelope beat;
      beat.mutable_heartbeat();
      send(beat);
      auto envelope = client_.receive(Deadline::after(std::chrono::milliseconds(50)));
      if (!envelope || envelope->has_heartbeat()) continue;
      if (!envelope->has_stop()) return envelope;
      stop_ = envelope->stop();
    }
    return std::nullopt;
  }
  // Waits for the Stop.
  proto::Stop stop() {
    while (next()) {
    }
    if (!stop_) ADD_FAILURE() << "no stop came";
    return stop_.value_or(proto::Stop{});
  }
  const proto::Welcome& welcome() const { return welcome_; }
  const std::string& id() const { return id_; }

 private:
  Client client_;
  const std::string id_;
  proto::Welcome welcome_;
  std::optional<proto::Stop> stop_;
};

struct WorkerScript {
  int64_t fail_at = 0;             // says WorkerFailed instead of training this step
  int64_t vanish_at = 0;           // closes its connection without a word at this step
  bool refuse_checkpoint = false;  // cannot load the first checkpoint it is given
};

class CoordinatorTest : public testing::Test {
 protected:
  CoordinatorTest() : run_{dir_.path() + "/run"} {
    options_.config.run.dir = run_.root;
    options_.config.run.name = "test";
    options_.config.train.steps = 12;
    options_.config.train.global_batch = 4;
    options_.config.train.eval_every = 4;
    options_.config.checkpoint.every = 5;
    options_.config.metrics.debug_samples = true;
    options_.config.elastic.heartbeat_s = 0.2;
    options_.config.elastic.join_timeout_s = 20;
    options_.config.elastic.shutdown_timeout_s = 5;
    options_.config.elastic.wait_timeout_s = 0;  // of fixed size
    options_.config.elastic.restarts = 0;
    options_.config.parallel.workers = 2;
    options_.handle_signals = false;
  }
  ~CoordinatorTest() override {
    for (auto& member : members_) member.join();
  }

  void start() {
    options_.config.elastic.min_workers = options_.config.parallel.workers;
    std::promise<std::string> listening;
    options_.on_listening = [&](const std::string& endpoint) { listening.set_value(endpoint); };
    auto endpoint = listening.get_future();
    result_ = std::async(std::launch::async, [this] { return run_coordinator(options_); });
    ASSERT_EQ(endpoint.wait_for(std::chrono::seconds(20)), std::future_status::ready);
    endpoint_ = endpoint.get();
  }
  int finish() {
    EXPECT_EQ(result_.wait_for(std::chrono::seconds(30)), std::future_status::ready)
        << "the coordinator does not end";
    const int code = result_.get();
    for (auto& member : members_) member.join();
    members_.clear();
    EXPECT_FALSE(std::filesystem::exists(run_.endpoint())) << "left behind";
    return code;
  }

  // Starts a member in a thread of its own and returns once it is welcome.
  void add(proto::Role role, const std::string& id, const std::function<void(Member*)>& script) {
    std::promise<void> welcome;
    auto is_welcome = welcome.get_future();
    members_.emplace_back([this, role, id, script, &welcome] {
      Member member(endpoint_, options_.security, role, id);
      welcome.set_value();
      script(&member);
    });
    ASSERT_EQ(is_welcome.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  }
  void add_agent() {
    add(proto::ROLE_NODE, "agent", [](Member* member) { member->stop(); });
  }
  void add_data(int64_t samples = 50) {
    add(proto::ROLE_DATA, "data", [samples](Member* member) {
      proto::Envelope envelope;
      auto* report = envelope.mutable_dataset_report();
      report->set_fingerprint("f00dfeed");
      report->set_train_samples(samples);
      report->set_held_out_samples(8);
      report->set_vocab_size(256);
      report->set_endpoint("ipc://@none");
      member->send(envelope);
      member->stop();
    });
  }
  void add_worker(const std::string& id, const WorkerScript& script = {}) {
    add(proto::ROLE_WORKER, id, [this, script](Member* member) { run_worker(member, script); });
  }
  void add_all() {
    add_agent();
    add_data();
    add_worker("w0");
    add_worker("w1");
  }

  void run_worker(Member* member, WorkerScript script) {
    uint64_t generation = 0;
    int rank = -1;
    while (auto message = member->next()) {
      if (message->has_assignment()) {
        generation = message->assignment().generation();
        rank = place_of(member->id(), message->assignment()).rank;
        {
          const std::lock_guard lock(mutex_);
          assignments_.push_back(message->assignment());
        }
        proto::Envelope ready;
        ready.mutable_ready()->set_generation(generation);
        ready.mutable_ready()->set_part(rank);
        ready.mutable_ready()->set_mirror_ready(true);
        if (script.refuse_checkpoint) {
          ready.mutable_ready()->set_checkpoint_error("shard-0: hash mismatch");
          script.refuse_checkpoint = false;
        }
        member->send(ready);
      } else if (message->has_step_plan()) {
        for (const proto::PlannedStep& step : message->step_plan().steps()) {
          if (script.vanish_at == step.step()) return;
          if (script.fail_at == step.step()) {
            proto::Envelope envelope;
            envelope.mutable_worker_failed()->set_error("a tensor went missing");
            member->send(envelope);
            member->stop();
            return;
          }
          train(member, generation, rank, step);
        }
      }
    }
  }
  void train(Member* member, uint64_t generation, int rank, const proto::PlannedStep& step) const {
    proto::Envelope envelope;
    auto* report = envelope.mutable_step_report();
    report->set_generation(generation);
    report->set_rank(rank);
    report->set_step(step.step());
    report->set_tokens(100);
    report->set_loss(5.0 / static_cast<double>(step.step()));
    report->set_step_s(0.001);
    report->set_mirror_ready(true);
    report->set_mirrored(step.step() - 1);
    for (int64_t sample : step.samples()) {
      report->add_samples(sample);
      report->add_sample_hashes(static_cast<uint64_t>(sample) * 3);
    }
    member->send(envelope);
    if (step.evaluate() && rank == 0) {
      proto::Envelope eval;
      eval.mutable_eval_report()->set_generation(generation);
      eval.mutable_eval_report()->set_step(step.step());
      eval.mutable_eval_report()->set_loss(1.5);
      member->send(eval);
    }
    if (step.save()) save(member, generation, rank, step.step());
  }
  void save(Member* member, uint64_t generation, int rank, int64_t step) const {
    const std::string folder = RunDir{member->welcome().run_dir()}.partial_checkpoint(step);
    std::filesystem::create_directories(folder);
    const std::string name = "shard-" + std::to_string(rank);
    const std::string content = "weights of " + name;
    std::ofstream(folder + "/" + name) << content;
    proto::Envelope envelope;
    auto* saved = envelope.mutable_shard_saved();
    saved->set_generation(generation);
    saved->set_rank(rank);
    saved->set_part(rank);
    saved->set_step(step);
    saved->set_file(name);
    saved->set_bytes(static_cast<int64_t>(content.size()));
    saved->set_xxh3(xxh3(content.data(), content.size()));
    if (rank == 0) saved->set_manifest_json(R"({"units": []})");
    member->send(envelope);
  }

  std::string last_event(const std::string& kind) const {
    std::string reason = "(none)";
    for (const Json& line : read_json_lines(run_.events())) {
      if (line.at("kind") == kind) reason = line.at("reason");
    }
    return reason;
  }

  TempDir dir_;
  RunDir run_;
  CoordinatorOptions options_;
  std::string endpoint_;
  std::future<int> result_;
  std::vector<std::thread> members_;
  std::mutex mutex_;
  std::vector<proto::Assignment> assignments_;
};

TEST_F(CoordinatorTest, ARunFromHelloToTheEnd) {
  start();
  EXPECT_EQ(read_file(run_.endpoint()), endpoint_ + "\n");
  add_all();
  EXPECT_EQ(finish(), 0);

  const auto metrics = read_json_lines(run_.metrics());
  ASSERT_EQ(metrics.size(), 12u);
  for (size_t i = 0; i < metrics.size(); ++i) {
    EXPECT_EQ(metrics[i].at("step"), i + 1);
    EXPECT_EQ(metrics[i].contains("held_out_loss"), (i + 1) % 4 == 0);
    EXPECT_EQ(metrics[i].at("world"), 2);
  }
  EXPECT_EQ(metrics.back().at("total_tokens"), 1200);
  // 12 steps of 4 of 50 samples: no sample may come twice.
  std::set<int64_t> seen;
  for (const Json& line : read_json_lines(run_.samples())) {
    for (const Json& id : line.at("samples")) EXPECT_TRUE(seen.insert(id.get<int64_t>()).second);
  }
  EXPECT_EQ(seen.size(), 48u);
  for (int64_t step : {5, 10, 12}) {
    EXPECT_TRUE(std::filesystem::exists(run_.checkpoint(step) + "/manifest.json")) << step;
  }
  const Json manifest = Json::parse(read_file(run_.checkpoint(12) + "/manifest.json"));
  EXPECT_TRUE(manifest.contains("units"));
  EXPECT_EQ(manifest.at("world_size"), 2);
  EXPECT_EQ(last_event("end"), "finished: 12 steps");
  EXPECT_EQ(parse_config(read_file(run_.config()), run_.config()).train.steps, 12);
  EXPECT_TRUE(std::filesystem::exists(run_.journal()));
}

TEST_F(CoordinatorTest, TheSamplesOfAStepDoNotDependOnTheNumberOfWorkers) {
  start();
  add_all();
  ASSERT_EQ(finish(), 0);
  const std::string with_two = read_file(run_.samples());
  run_.root += "-alone";
  options_.config.run.dir = run_.root;
  options_.config.parallel.workers = 1;
  start();
  add_agent();
  add_data();
  add_worker("w0");
  ASSERT_EQ(finish(), 0);
  EXPECT_EQ(read_file(run_.samples()), with_two);
}

TEST_F(CoordinatorTest, AFailedWorkerEndsTheRunAndTheNextStartResumes) {
  start();
  add_agent();
  add_data();
  add_worker("w0");
  add_worker("w1", {.fail_at = 8});
  EXPECT_EQ(finish(), 1);
  EXPECT_THAT(last_event("fault"), HasSubstr("a tensor went missing"));
  EXPECT_THAT(last_event("fault"), HasSubstr("resume from step 5 with: muster train " + run_.root));
  const auto before = read_json_lines(run_.metrics());

  start();
  add_all();
  EXPECT_EQ(finish(), 0);
  EXPECT_EQ(assignments_.back().resume_step(), 5);
  EXPECT_EQ(assignments_.back().generation(), 2u);
  const auto metrics = read_json_lines(run_.metrics());
  ASSERT_EQ(metrics.size(), 12u) << "each step once";
  EXPECT_EQ(metrics[4], before[4]);
  EXPECT_EQ(metrics[5].at("generation"), 2);
}

TEST_F(CoordinatorTest, AWorkerThatVanishesEndsTheRunInTime) {
  start();
  add_agent();
  add_data();
  add_worker("w0");
  add_worker("w1", {.vanish_at = 3});
  const auto begin = Deadline::Clock::now();
  EXPECT_EQ(finish(), 1);
  EXPECT_LT(Deadline::Clock::now() - begin, std::chrono::seconds(10));
  EXPECT_THAT(last_event("fault"), HasSubstr("worker 1 (pid 4242 on host testhost)"));
}

TEST_F(CoordinatorTest, ATornShardIsNamedAndTheOneBeforeIsUsed) {
  start();
  add_all();
  ASSERT_EQ(finish(), 0);
  std::filesystem::resize_file(run_.checkpoint(12) + "/shard-1", 3);
  std::filesystem::create_directories(run_.partial_checkpoint(11));
  start();
  EXPECT_FALSE(std::filesystem::exists(run_.partial_checkpoint(11))) << "a stale partial";
  add_all();
  EXPECT_EQ(finish(), 0);
  EXPECT_EQ(assignments_.back().resume_step(), 10);
  EXPECT_THAT(last_event("checkpoint_rejected"),
              HasSubstr("step-00000012/shard-1: the shard is torn: 3 bytes"));
  EXPECT_EQ(read_json_lines(run_.metrics()).size(), 12u);
}

TEST_F(CoordinatorTest, WhereNothingIsLeftToDoNobodyIsWaitedFor) {
  start();
  add_all();
  ASSERT_EQ(finish(), 0);
  CoordinatorOptions again = options_;
  again.on_listening = [](const std::string& endpoint) {
    ADD_FAILURE() << "waits for others at " << endpoint;
  };
  const auto begin = Deadline::Clock::now();
  EXPECT_EQ(run_coordinator(again), 0);
  EXPECT_LT(Deadline::Clock::now() - begin, std::chrono::seconds(10));
  EXPECT_THAT(nothing_to_do(again.config).value_or("something"),
              HasSubstr("nothing to do: the checkpoint of step 12"));
  again.config.train.steps = 13;
  EXPECT_EQ(nothing_to_do(again.config), std::nullopt);
}

TEST_F(CoordinatorTest, AShardThatAWorkerRejectsIsPassedOver) {
  start();
  add_all();
  ASSERT_EQ(finish(), 0);
  options_.config.train.steps = 14;
  start();
  add_agent();
  add_data();
  add_worker("w0", {.refuse_checkpoint = true});
  add_worker("w1");
  EXPECT_EQ(finish(), 0);
  EXPECT_EQ(assignments_.back().resume_step(), 10);
  EXPECT_EQ(assignments_.back().generation(), 3u);
  EXPECT_THAT(last_event("checkpoint_rejected"), HasSubstr("hash mismatch"));
}

TEST_F(CoordinatorTest, GarbageDoesNotDisturbARun) {
  start();
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port =
      htons(static_cast<uint16_t>(std::stoi(endpoint_.substr(endpoint_.rfind(':') + 1))));
  inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
  ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  const std::string noise = "GET / HTTP/1.1\r\n\r\n" + std::string(1000, '\xfe');
  EXPECT_EQ(write(fd, noise.data(), noise.size()), static_cast<ssize_t>(noise.size()));
  add_all();
  EXPECT_EQ(finish(), 0);
  close(fd);
}

TEST_F(CoordinatorTest, AnObserverSeesAndStopsTheRun) {
  options_.config.train.steps = 1'000'000;
  start();
  add_all();
  Client observer(endpoint_, options_.security, "the coordinator");
  proto::Envelope request;
  request.mutable_status_request();
  proto::Status status;
  const Deadline deadline = soon();
  while (status.step() < 3 && !deadline.passed()) {
    status = observer.call(request, soon()).status();
  }
  EXPECT_GE(status.step(), 3);
  EXPECT_EQ(status.members_size(), 4);
  proto::Envelope stop;
  stop.mutable_stop_request()->set_reason("seen enough");
  EXPECT_TRUE(observer.call(stop, soon()).has_accepted());
  while (!status.finished() && !deadline.passed()) {
    status = observer.call(request, soon()).status();
  }
  EXPECT_TRUE(status.ok());
  EXPECT_THAT(status.reason(), HasSubstr("saved: seen enough"));
  EXPECT_EQ(finish(), 0);
  EXPECT_TRUE(std::filesystem::exists(run_.checkpoint(status.step())));
}

TEST_F(CoordinatorTest, ACorpusSmallerThanABatchIsRefused) {
  start();
  add_agent();
  add_data(3);
  EXPECT_EQ(finish(), 1);
  EXPECT_THAT(last_event("fault"), HasSubstr("smaller than one batch: 3 training samples"));
}

TEST_F(CoordinatorTest, BeyondThisMachineAKeyIsAsked) {
  options_.listen = "tcp://0.0.0.0:0";
  start();
  const std::string local = "tcp://127.0.0.1" + endpoint_.substr(endpoint_.rfind(':'));
  proto::Envelope request;
  request.mutable_status_request();
  EXPECT_THROW(Client(local, {}, "the coordinator").call(request, soon()), PeerError);
  EXPECT_THROW(Client(local, {generate_run_key()}, "the coordinator").call(request, soon()),
               PeerError);
  const Security key{read_run_key(run_.run_key())};
  // A watcher that stays would be waited for at the end.
  EXPECT_TRUE(Client(local, key, "the coordinator").call(request, soon()).has_status());
  Client admitted(local, key, "the coordinator");
  proto::Envelope stop;
  stop.mutable_stop_request()->set_immediately(true);
  EXPECT_TRUE(admitted.call(stop, soon()).has_accepted());
  EXPECT_EQ(finish(), 1);
}

TEST_F(CoordinatorTest, ASecondOneInTheSameDirectoryIsRefused) {
  start();
  CoordinatorOptions second = options_;
  second.on_listening = nullptr;
  try {
    run_coordinator(second);
    ADD_FAILURE() << "no error";
  } catch (const PeerError& e) {
    EXPECT_THAT(e.what(), HasSubstr(endpoint_));
  }
  Client observer(endpoint_, {}, "the coordinator");
  proto::Envelope stop;
  stop.mutable_stop_request()->set_immediately(true);
  observer.call(stop, soon());
  EXPECT_EQ(finish(), 1);
}

TEST_F(CoordinatorTest, APortInUseIsNamed) {
  Server other("tcp://127.0.0.1:0", {});
  options_.listen = other.endpoint();
  try {
    run_coordinator(options_);
    ADD_FAILURE() << "no error";
  } catch (const PeerError& e) {
    EXPECT_THAT(e.what(), HasSubstr(other.endpoint()));
    EXPECT_THAT(e.what(), HasSubstr("in use"));
  }
}

TEST_F(CoordinatorTest, WhatCannotBeResumedIsRefusedAtTheStart) {
  start();
  add_all();
  ASSERT_EQ(finish(), 0);
  const auto error_of = [&](auto change) {
    CoordinatorOptions options = options_;
    options.on_listening = nullptr;
    change(&options.config);
    try {
      run_coordinator(options);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  EXPECT_THAT(error_of([](Config* config) { config->model.layers += 1; }),
              HasSubstr("another model: its model.layers is"));
  EXPECT_THAT(error_of([](Config* config) { config->run.resume = "never"; }),
              HasSubstr("holds a run already"));
  EXPECT_THAT(error_of([](Config* config) {
                config->run.dir += "-fresh";
                config->run.resume = "must";
              }),
              HasSubstr("holds no whole checkpoint"));
}

}  // namespace
}  // namespace muster
