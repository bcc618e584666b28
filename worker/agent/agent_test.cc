#include "worker/agent/agent.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <functional>
#include <future>
#include <iterator>
#include <limits>
#include <optional>
#include <sstream>
#include <thread>

#include "common/config/config.h"
#include "common/error.h"
#include "common/files.h"
#include "common/identity.h"
#include "common/process.h"

namespace muster {
namespace {

using testing::HasSubstr;
using testing::StartsWith;
using testing::UnorderedElementsAre;

constexpr std::chrono::seconds kPatience(10);
constexpr double kHeartbeat = 0.1;

// A coordinator made of a Server and a script, and a program that stands in for muster: it writes
// down how it was started and stays until somebody writes a line to the fifo, or for ever.
class AgentTest : public testing::Test {
 protected:
  AgentTest() : server_("tcp://127.0.0.1:0", Security{}) {
    program_ = dir_.path() + "/muster";
    fifo_path_ = dir_.path() + "/fifo";
    EXPECT_EQ(::mkfifo(fifo_path_.c_str(), 0600), 0);
    fifo_ = Fd(::open(fifo_path_.c_str(), O_RDWR | O_CLOEXEC));
  }

  void write_program(const std::string& body) {
    write_file_atomic(program_, "#!/bin/sh\necho \"$@ spin=$GOMP_SPINCOUNT\" >> " + dir_.path() +
                                    "/started\n" + body);
    ::chmod(program_.c_str(), 0700);
  }
  void write_patient_program() { write_program("read line < " + fifo_path_ + "\n"); }
  void let_all_end(int processes) {
    for (int i = 0; i < processes; ++i) write_all(fifo_.get(), "end\n", fifo_path_);
  }

  // Runs the agent here, in the main thread, and `coordinator` in another.
  int run(const std::function<void()>& coordinator, int workers = 2) {
    auto done = std::async(std::launch::async, coordinator);
    AgentOptions options;
    options.coordinator = server_.endpoint();
    options.workers = workers;
    options.program = program_;
    options.connect_timeout_s = 2.0;
    const int code = run_agent(options);
    done.get();
    return code;
  }

  // The next message that is no heartbeat; heartbeats are answered meanwhile. nullopt: none came
  // until `most_beats` heartbeats had.
  std::optional<proto::Envelope> next_within(int most_beats) {
    const Deadline deadline = Deadline::after(kPatience);
    while (!deadline.passed()) {
      const auto received = server_.receive(deadline);
      if (!received) break;
      peer_ = received->peer;
      if (!received->envelope.has_heartbeat()) return received->envelope;
      proto::Envelope beat;
      beat.mutable_heartbeat();
      server_.send(peer_, beat);
      if (--most_beats == 0) return std::nullopt;
    }
    ADD_FAILURE() << "the agent said nothing";
    return {};
  }
  proto::Envelope next() {
    return next_within(std::numeric_limits<int>::max()).value_or(proto::Envelope());
  }
  proto::ProcessExited next_exit() { return next().process_exited(); }
  void welcome(
      double shutdown_timeout_s = 10, const std::function<void()>& before = [] {}) {
    const proto::Envelope hello = next();
    EXPECT_EQ(hello.hello().role(), proto::ROLE_NODE);
    EXPECT_EQ(hello.hello().member_id(), hello.hello().node_id());
    node_id_ = hello.hello().node_id();
    before();
    proto::Envelope envelope;
    envelope.set_request_id(hello.request_id());
    config_.elastic.shutdown_timeout_s = shutdown_timeout_s;
    envelope.mutable_welcome()->set_config_toml(to_toml(config_));
    envelope.mutable_welcome()->set_run_dir(dir_.path() + "/run");
    envelope.mutable_welcome()->set_heartbeat_s(kHeartbeat);
    envelope.mutable_welcome()->set_run_token(run_token_);
    EXPECT_TRUE(server_.send(peer_, envelope));
  }
  void stop(bool ok) {
    proto::Envelope envelope;
    envelope.mutable_stop()->set_ok(ok);
    envelope.mutable_stop()->set_reason("the test is over");
    EXPECT_TRUE(server_.send(peer_, envelope));
  }
  void start_workers(int count) {
    proto::Envelope envelope;
    envelope.mutable_start_workers()->set_count(count);
    EXPECT_TRUE(server_.send(peer_, envelope));
  }
  // Answers heartbeats until `count` processes run and `started` have started in all (0: the same);
  // their pids in the order of their start.
  std::vector<pid_t> children(size_t count, size_t started = 0) {
    if (started == 0) started = count;
    const Deadline deadline = Deadline::after(kPatience);
    while (!deadline.passed()) {
      const auto received = server_.receive(Deadline::after(std::chrono::milliseconds(20)));
      if (received && received->envelope.has_heartbeat()) {
        proto::Envelope beat;
        beat.mutable_heartbeat();
        server_.send(peer_, beat);
      }
      std::istringstream list(
          read_file("/proc/self/task/" + std::to_string(::getpid()) + "/children"));
      std::vector<pid_t> pids{std::istream_iterator<pid_t>(list), {}};
      if (pids.size() == count && std::filesystem::exists(dir_.path() + "/started") &&
          started_lines().size() == started) {
        return pids;
      }
    }
    ADD_FAILURE() << "the agent did not start its processes";
    return {};
  }
  // How the processes were started, the arguments of each.
  std::vector<std::string> started_lines() const {
    std::istringstream text(read_file(dir_.path() + "/started"));
    std::vector<std::string> lines;
    for (std::string line; std::getline(text, line);) lines.push_back(line);
    return lines;
  }
  static std::string member_id_of(const std::string& started) {
    const std::string option = "--member-id ";
    const size_t id = started.find(option) + option.size();
    return started.substr(id, started.find(' ', id) - id);
  }
  void expect_no_children() {
    EXPECT_EQ(read_file("/proc/self/task/" + std::to_string(::getpid()) + "/children"), "");
  }

  const TempDir dir_;
  Server server_;
  Config config_;
  std::string program_, fifo_path_, peer_, node_id_, run_token_;
  Fd fifo_;
};

TEST_F(AgentTest, StartsOneDataServiceAndTheWorkersAndEndsWithThem) {
  write_patient_program();
  EXPECT_EQ(run([&] {
              welcome();
              children(3);
              stop(true);
              let_all_end(3);
            }),
            0);
  expect_no_children();
  const bool spin_set_by_user =
      std::getenv("OMP_WAIT_POLICY") != nullptr || std::getenv("GOMP_SPINCOUNT") != nullptr;
  int data = 0, workers = 0;
  for (const std::string& line : started_lines()) {
    EXPECT_THAT(line, HasSubstr("--coordinator " + server_.endpoint() + " --node-id " + node_id_));
    EXPECT_THAT(line, HasSubstr(" --member-id "));
    // Only workers compute; what the user has set stands.
    EXPECT_EQ(line.ends_with(" spin=1000"), line.starts_with("worker ") && !spin_set_by_user);
    data += line.starts_with("data ") ? 1 : 0;
    workers += line.starts_with("worker --workers-on-node 2 ") ? 1 : 0;
  }
  EXPECT_EQ(data, 1);
  EXPECT_EQ(workers, 2);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir_.path() + "/run/logs"), {}), 3);
}

TEST_F(AgentTest, AFaultOfTheRunIsItsOwn) {
  write_patient_program();
  EXPECT_EQ(run([&] {
              welcome();
              children(3);
              stop(false);
              let_all_end(3);
            }),
            1);
}

TEST_F(AgentTest, ReportsAnExitAtOnce) {
  write_patient_program();
  config_.elastic.restarts = 0;
  const int code = run([&] {
    welcome();
    const std::vector<pid_t> pids = children(3);
    ::kill(pids[1], SIGKILL);
    const proto::ProcessExited exited = next_exit();
    EXPECT_EQ(exited.pid(), pids[1]);
    EXPECT_EQ(exited.role(), proto::ROLE_WORKER);
    EXPECT_TRUE(exited.signalled());
    EXPECT_EQ(exited.code(), SIGKILL);
    EXPECT_FALSE(exited.member_id().empty());
    EXPECT_LT(exited.restart_in_s(), 0.0);
    EXPECT_EQ(exited.no_restart(), "");
    stop(false);
    let_all_end(2);
  });
  EXPECT_EQ(code, 1);
  EXPECT_EQ(started_lines().size(), 3U);
}

TEST_F(AgentTest, ReportsAnExitStatus) {
  write_program("test $1 = worker && exit 3\nread line < " + fifo_path_ + "\n");
  config_.elastic.restarts = 0;
  const int code = run(
      [&] {
        welcome();
        const proto::ProcessExited exited = next_exit();
        EXPECT_FALSE(exited.signalled());
        EXPECT_EQ(exited.code(), 3);
        stop(false);
        let_all_end(1);
      },
      1);
  EXPECT_EQ(code, 1);
}

TEST_F(AgentTest, StartsACrashedWorkerAnew) {
  write_patient_program();
  EXPECT_EQ(run([&] {
              welcome();
              const std::vector<pid_t> pids = children(3);
              ::kill(pids[1], SIGKILL);
              const proto::ProcessExited exited = next_exit();
              EXPECT_GT(exited.restart_in_s(), 0.0);
              EXPECT_LE(exited.restart_in_s(), 0.1);
              EXPECT_EQ(exited.no_restart(), "");
              EXPECT_EQ(exited.load().workers(), 2) << "soon again";
              children(3, /*started=*/4);
              const std::string again = started_lines().back();
              EXPECT_THAT(again, StartsWith("worker --workers-on-node 2 --local-rank 0 "));
              EXPECT_NE(member_id_of(again), exited.member_id());
              stop(true);
              let_all_end(3);
            }),
            0);
}

TEST_F(AgentTest, StartsACrashedDataServiceAnew) {
  write_patient_program();
  EXPECT_EQ(run([&] {
              welcome();
              ::kill(children(3)[0], SIGKILL);
              const proto::ProcessExited exited = next_exit();
              EXPECT_EQ(exited.role(), proto::ROLE_DATA);
              EXPECT_GE(exited.restart_in_s(), 0.0);
              children(3, /*started=*/4);
              EXPECT_THAT(started_lines().back(), StartsWith("data "));
              EXPECT_NE(member_id_of(started_lines().back()), exited.member_id());
              stop(true);
              let_all_end(3);
            }),
            0);
}

TEST_F(AgentTest, StartsNothingForAWhileAfterTooManyCrashes) {
  write_program("test $1 = worker && exit 3\nread line < " + fifo_path_ + "\n");
  config_.elastic.restarts = 1;
  config_.elastic.cool_down_s = 1.0;
  const int code = run(
      [&] {
        welcome();
        EXPECT_GE(next_exit().restart_in_s(), 0.0);
        const proto::ProcessExited second = next_exit();
        const auto set_aside = Deadline::Clock::now();
        EXPECT_LT(second.restart_in_s(), 0.0);
        EXPECT_THAT(second.no_restart(), HasSubstr("worker 0 on "));
        EXPECT_EQ(second.load().workers(), 0) << "not before the cool-down is over";
        EXPECT_THAT(second.no_restart(), HasSubstr("exited with status 3, crash 2 on its node"));
        // Then what is missing is started, and has its restart again.
        const proto::ProcessExited third = next_exit();
        EXPECT_GE(Deadline::Clock::now() - set_aside, std::chrono::milliseconds(600));
        EXPECT_GE(third.restart_in_s(), 0.0);
        stop(false);
        let_all_end(1);
      },
      1);
  EXPECT_EQ(code, 1);
}

TEST_F(AgentTest, StaysWithoutWorkersAndStartsMoreWhenAsked) {
  const std::string stay = dir_.path() + "/stay";
  write_program("test $1 = worker && ! test -e " + stay + " && exit 0\nread line < " + fifo_path_ +
                "\n");
  EXPECT_EQ(run(
                [&] {
                  welcome(/*shutdown_timeout_s=*/0.1);
                  const proto::ProcessExited exited = next_exit();
                  EXPECT_EQ(exited.code(), 0);
                  EXPECT_LT(exited.restart_in_s(), 0.0);
                  EXPECT_EQ(exited.no_restart(), "");
                  EXPECT_EQ(exited.load().workers(), 0);
                  EXPECT_EQ(next_within(3), std::nullopt);
                  write_file_atomic(stay, "");
                  start_workers(2);
                  children(3, /*started=*/4);
                  start_workers(1);
                  const pid_t first = children(4, /*started=*/5)[1];
                  ::kill(first, SIGKILL);
                  const proto::ProcessExited killed = next_exit();
                  EXPECT_EQ(killed.load().workers(), 3);
                  EXPECT_EQ(killed.load().asked(), 3);
                  children(4, /*started=*/6);
                  stop(true);
                  let_all_end(4);
                },
                /*workers=*/1),
            0);
  const auto lines = started_lines();
  // The rank that became free, and the next ones.
  EXPECT_THAT(std::vector(lines.begin() + 2, lines.begin() + 4),
              UnorderedElementsAre(StartsWith("worker --workers-on-node 2 --local-rank 0 "),
                                   StartsWith("worker --workers-on-node 2 --local-rank 1 ")));
  EXPECT_THAT(lines[4], StartsWith("worker --workers-on-node 3 --local-rank 2 "));
}

TEST_F(AgentTest, EndsAProcessThatTheCoordinatorNames) {
  write_program("trap '' TERM INT; while true; do sleep 100; done\n");
  const int code = run([&] {
    welcome(/*shutdown_timeout_s=*/0.1);
    children(3);
    proto::Envelope envelope;
    for (const std::string& line : started_lines()) {
      if (!line.starts_with("worker ")) continue;
      envelope.mutable_end_process()->set_member_id(member_id_of(line));
    }
    envelope.mutable_end_process()->set_reason("silent for 5 s");
    EXPECT_TRUE(server_.send(peer_, envelope));
    const proto::ProcessExited exited = next_exit();
    EXPECT_EQ(exited.member_id(), envelope.end_process().member_id());
    EXPECT_TRUE(exited.signalled());
    EXPECT_EQ(exited.code(), SIGKILL);
    EXPECT_GE(exited.restart_in_s(), 0.0);
    stop(true);
  });
  EXPECT_EQ(code, 0);
  expect_no_children();
}

TEST_F(AgentTest, RestsUntilItsProcessesEndAfterTheRun) {
  write_patient_program();
  const auto used = [] {
    timespec time{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  const double before = used();
  const int code = run([&] {
    welcome();
    children(3);
    stop(true);
    std::this_thread::sleep_for(std::chrono::seconds(1));
    let_all_end(3);
  });
  EXPECT_EQ(code, 0);
  EXPECT_LT(used() - before, 0.25) << "seconds of CPU time";
}

TEST_F(AgentTest, KillsWhatDoesNotEndInTime) {
  write_program("trap '' TERM INT; while true; do sleep 100; done\n");
  const int code = run([&] {
    welcome(/*shutdown_timeout_s=*/0.1);
    children(3);
    stop(true);
  });
  EXPECT_EQ(code, 0);
  expect_no_children();
}

TEST_F(AgentTest, KillsAtOnceWhatTheCoordinatorCallsSilent) {
  write_program("trap '' TERM INT; while true; do sleep 100; done\n");
  const auto begin = Deadline::Clock::now();
  const int code = run([&] {
    welcome(/*shutdown_timeout_s=*/60);
    children(3);
    proto::Envelope envelope;
    envelope.mutable_stop()->set_reason("all of them are silent");
    for (const std::string& line : started_lines()) {
      envelope.mutable_stop()->add_silent(member_id_of(line));
    }
    EXPECT_TRUE(server_.send(peer_, envelope));
  });
  EXPECT_EQ(code, 1);
  EXPECT_LT(Deadline::Clock::now() - begin, std::chrono::seconds(30));
  expect_no_children();
}

TEST_F(AgentTest, SigtermAsksToLeave) {
  write_patient_program();
  const int code = run([&] {
    welcome();
    children(3);
    ::kill(::getpid(), SIGTERM);
    EXPECT_EQ(next().leaving().reason(), "SIGTERM");
    stop(true);
    let_all_end(3);
  });
  EXPECT_EQ(code, 0);
}

TEST_F(AgentTest, ASecondSignalLeavesNow) {
  write_patient_program();
  const int code = run([&] {
    welcome();
    children(3);
    ::kill(::getpid(), SIGINT);
    EXPECT_EQ(next().leaving().reason(), "SIGINT");
    ::kill(::getpid(), SIGINT);
  });
  EXPECT_EQ(code, 1);
  expect_no_children();
}

TEST_F(AgentTest, LeavesWithinItsTimeoutWhenNobodyGrantsIt) {
  // A worker that gets SIGTERM would tell the coordinator that it wishes to leave.
  write_program("trap 'touch " + dir_.path() + "/terminated' TERM\nread line < " + fifo_path_ +
                "\n");
  config_.elastic.collective_timeout_s = 0.2;
  const int code = run([&] {
    welcome();
    children(3);
    ::kill(::getpid(), SIGTERM);
    EXPECT_TRUE(next().has_leaving());
    for (int i = 0; i < 3; ++i) {
      const proto::ProcessExited exited = next_exit();
      EXPECT_EQ(exited.code(), SIGKILL);
      EXPECT_LT(exited.restart_in_s(), 0.0);
    }
  });
  EXPECT_EQ(code, 1);
  expect_no_children();
  EXPECT_FALSE(std::filesystem::exists(dir_.path() + "/terminated"));
}

TEST_F(AgentTest, HandingOverMayTakeLongerThanShuttingDown) {
  write_patient_program();
  EXPECT_EQ(run([&] {
              welcome(/*shutdown_timeout_s=*/0.1);
              children(3);
              ::kill(::getpid(), SIGUSR1);
              EXPECT_EQ(next().leaving().reason(), "SIGUSR1");
              EXPECT_EQ(next_within(4), std::nullopt);
              let_all_end(3);
              for (int i = 0; i < 3; ++i) EXPECT_EQ(next_exit().code(), 0);
              stop(true);
            }),
            0);
}

TEST_F(AgentTest, WhileItLeavesNoWorkerIsStarted) {
  write_patient_program();
  EXPECT_EQ(run([&] {
              welcome();
              const std::vector<pid_t> pids = children(3);
              ::kill(::getpid(), SIGTERM);
              EXPECT_TRUE(next().has_leaving());
              ::kill(pids[1], SIGKILL);
              const proto::ProcessExited exited = next_exit();
              EXPECT_LT(exited.restart_in_s(), 0.0);
              EXPECT_EQ(exited.no_restart(), "");
              // The other one still needs its batches.
              ::kill(pids[0], SIGKILL);
              EXPECT_GE(next_exit().restart_in_s(), 0.0);
              start_workers(1);
              children(2, /*started=*/4);
              stop(true);
              let_all_end(2);
            }),
            0);
  EXPECT_THAT(started_lines().back(), StartsWith("data "));
}

TEST_F(AgentTest, EndsItsProcessesWhenTheCoordinatorFallsSilent) {
  config_.elastic.collective_timeout_s = 0.2;
  write_patient_program();
  EXPECT_EQ(run([&] {
              welcome();
              children(3);
            }),
            1);
  expect_no_children();
}

TEST_F(AgentTest, ACoordinatorThatComesTooLateDoesNotGetThisNode) {
  write_patient_program();
  EXPECT_EQ(
      run([&] {
        welcome();
        children(3);
        std::this_thread::sleep_for(std::chrono::duration<double>(10 * kHeartbeat));
        proto::Envelope envelope;
        envelope.mutable_hello_again();
        EXPECT_TRUE(server_.send(peer_, envelope));
        std::optional<Received> received;
        while ((received = server_.receive(Deadline::after(std::chrono::milliseconds(300))))) {
          EXPECT_TRUE(received->envelope.has_heartbeat());
        }
        let_all_end(3);
      }),
      1);
}

// The log of the first process is a fifo here: opening it, and so the start of the process, takes
// until somebody reads.
TEST_F(AgentTest, ThatStartingTakesLongIsNotTheCoordinatorsSilence) {
  write_patient_program();
  EXPECT_EQ(run([&] {
              const std::string logs = dir_.path() + "/run/logs";
              std::filesystem::create_directories(logs);
              std::string log;
              welcome(/*shutdown_timeout_s=*/10, [&] {
                log = logs + "/" + host_name() + "-" + node_id_.substr(0, 4) + "-data.log";
                EXPECT_EQ(::mkfifo(log.c_str(), 0600), 0);
              });
              std::this_thread::sleep_for(std::chrono::duration<double>(7 * kHeartbeat));
              const Fd reader(::open(log.c_str(), O_RDONLY | O_CLOEXEC));
              children(3);
              EXPECT_EQ(next_within(3), std::nullopt);
              stop(true);
              let_all_end(3);
            }),
            0);
}

TEST_F(AgentTest, NamesACoordinatorThatIsNotThere) {
  AgentOptions options;
  options.coordinator = "tcp://127.0.0.1:9";
  options.workers = 1;
  options.connect_timeout_s = 0.1;
  try {
    run_agent(options);
    FAIL();
  } catch (const TimeoutError& error) {
    EXPECT_THAT(error.what(), HasSubstr("tcp://127.0.0.1:9"));
  }
}

TEST_F(AgentTest, ReportsARefusal) {
  write_patient_program();
  try {
    run([&] {
      const proto::Envelope hello = next();
      proto::Envelope envelope;
      envelope.set_request_id(hello.request_id());
      envelope.mutable_refused()->set_reason("the run has all its workers");
      server_.send(peer_, envelope);
    });
    FAIL();
  } catch (const PeerError& error) {
    EXPECT_THAT(error.what(), HasSubstr("the run has all its workers"));
  }
  EXPECT_FALSE(std::filesystem::exists(dir_.path() + "/started"));
}

TEST_F(AgentTest, WithdrawsWhereTheRunDirectoryIsNotShared) {
  write_patient_program();
  const std::string run_dir = dir_.path() + "/run";
  try {
    run([&] {
      run_token_ = "the coordinator's";
      welcome();
      EXPECT_THAT(next().withdrawn().reason(), HasSubstr("does not share the run directory"));
    });
    FAIL();
  } catch (const PeerError& error) {
    EXPECT_THAT(error.what(), HasSubstr("RUN_DIR must be on a file system that all nodes have"));
    EXPECT_THAT(error.what(), HasSubstr(run_dir));
  }
  EXPECT_FALSE(std::filesystem::exists(dir_.path() + "/started"));
  EXPECT_FALSE(std::filesystem::exists(run_dir)) << "made on the wrong machine";
}

TEST_F(AgentTest, JoinsOnceTheTokenShows) {
  write_patient_program();
  std::filesystem::create_directories(dir_.path() + "/run");
  EXPECT_EQ(run([&] {
              run_token_ = "the coordinator's";
              welcome();
              write_file_atomic(dir_.path() + "/run/coordinator.token", run_token_);
              children(3);
              stop(true);
              let_all_end(3);
            }),
            0);
}

TEST_F(AgentTest, NamesAProgramThatCannotRun) {
  program_ = dir_.path() + "/none";
  try {
    run([&] { welcome(); });
    FAIL();
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), HasSubstr(program_ + ": No such file or directory"));
  }
}

TEST(DefaultWorkersTest, OneForTwoCores) {
  EXPECT_EQ(default_workers(1), 1);
  EXPECT_EQ(default_workers(2), 1);
  EXPECT_EQ(default_workers(3), 1);
  EXPECT_EQ(default_workers(16), 8);
  EXPECT_GE(default_workers(), 1);
}

}  // namespace
}  // namespace muster
