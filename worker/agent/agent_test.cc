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
#include <sstream>
#include <thread>

#include "common/config/config.h"
#include "common/error.h"
#include "common/files.h"
#include "common/process.h"

namespace muster {
namespace {

using testing::HasSubstr;

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

  // The next message that is no heartbeat; heartbeats are answered meanwhile.
  proto::Envelope next() {
    const Deadline deadline = Deadline::after(kPatience);
    while (!deadline.passed()) {
      const auto received = server_.receive(deadline);
      if (!received) break;
      peer_ = received->peer;
      if (!received->envelope.has_heartbeat()) return received->envelope;
      proto::Envelope beat;
      beat.mutable_heartbeat();
      server_.send(peer_, beat);
    }
    ADD_FAILURE() << "the agent said nothing";
    return {};
  }
  void welcome(double shutdown_timeout_s = 10) {
    const proto::Envelope hello = next();
    EXPECT_EQ(hello.hello().role(), proto::ROLE_NODE);
    EXPECT_EQ(hello.hello().member_id(), hello.hello().node_id());
    node_id_ = hello.hello().node_id();
    proto::Envelope envelope;
    envelope.set_request_id(hello.request_id());
    Config config;
    config.elastic.shutdown_timeout_s = shutdown_timeout_s;
    envelope.mutable_welcome()->set_config_toml(to_toml(config));
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
  // Answers heartbeats until all processes have started; pid by what /proc says they run.
  std::vector<pid_t> children(size_t count) {
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
          lines(dir_.path() + "/started").size() == count) {
        return pids;
      }
    }
    ADD_FAILURE() << "the agent did not start its processes";
    return {};
  }
  static std::vector<std::string> lines(const std::string& path) {
    std::istringstream text(read_file(path));
    std::vector<std::string> lines;
    for (std::string line; std::getline(text, line);) lines.push_back(line);
    return lines;
  }
  void expect_no_children() {
    EXPECT_EQ(read_file("/proc/self/task/" + std::to_string(::getpid()) + "/children"), "");
  }

  const TempDir dir_;
  Server server_;
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
  for (const std::string& line : lines(dir_.path() + "/started")) {
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
  const int code = run([&] {
    welcome();
    const std::vector<pid_t> pids = children(3);
    ::kill(pids[1], SIGKILL);
    const proto::Envelope report = next();
    EXPECT_EQ(report.process_exited().pid(), pids[1]);
    EXPECT_EQ(report.process_exited().role(), proto::ROLE_WORKER);
    EXPECT_TRUE(report.process_exited().signalled());
    EXPECT_EQ(report.process_exited().code(), SIGKILL);
    EXPECT_FALSE(report.process_exited().member_id().empty());
    stop(false);
    let_all_end(2);
  });
  EXPECT_EQ(code, 1);
}

TEST_F(AgentTest, ReportsAnExitStatus) {
  write_program("test $1 = worker && exit 3\nread line < " + fifo_path_ + "\n");
  const int code = run(
      [&] {
        welcome();
        const proto::Envelope report = next();
        EXPECT_FALSE(report.process_exited().signalled());
        EXPECT_EQ(report.process_exited().code(), 3);
        stop(false);
        let_all_end(1);
      },
      1);
  EXPECT_EQ(code, 1);
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
    for (const std::string& line : lines(dir_.path() + "/started")) {
      const std::string option = "--member-id ";
      const size_t id = line.find(option) + option.size();
      envelope.mutable_stop()->add_silent(line.substr(id, line.find(' ', id) - id));
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
  write_patient_program();
  const int code = run([&] {
    welcome(/*shutdown_timeout_s=*/0.2);
    children(3);
    ::kill(::getpid(), SIGTERM);
    next();
  });
  EXPECT_EQ(code, 1);
  expect_no_children();
}

TEST_F(AgentTest, EndsItsProcessesWhenTheCoordinatorFallsSilent) {
  write_patient_program();
  try {
    run([&] {
      welcome();
      children(3);
    });
    FAIL();
  } catch (const PeerError& error) {
    EXPECT_EQ(error.what(), "the coordinator at " + server_.endpoint() +
                                " has been silent for 0.5 s: this node's processes were ended");
  }
  expect_no_children();
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
