// Every rank is a process of its own with a GPU of its own: this program once more, whose
// environment says which rank it is and what it plays. Sums of small integers are exact in any
// order, also in bfloat16.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <future>

#include "common/files.h"
#include "kernels/cuda/gpu_testing.h"
#include "worker/comm/nccl_communicator.h"
#include "worker/comm/single_communicator.h"
#include "worker/comm/testing.h"

namespace muster {
namespace {

using testing::bf16_bits;
using testing::FolderStore;
using testing::from_bf16_bits;
using testing::GpuTest;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// One process's GPU.
class Gpu {
 public:
  explicit Gpu(int index) : memory_(index) {
    CUDA_CHECK(cudaSetDevice(index));
    cudaStream_t handle = nullptr;
    CUDA_CHECK(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking));
    stream_ = {Device::cuda(index), handle};
  }
  const Stream& stream() const { return stream_; }
  cudaStream_t handle() const { return static_cast<cudaStream_t>(stream_.handle); }
  Tensor tensor(int64_t n, DType dtype) { return Tensor({n}, dtype, memory_); }
  void synchronize() const { CUDA_CHECK(cudaStreamSynchronize(handle())); }

  Tensor upload(const std::vector<double>& values, DType dtype) {
    const Tensor host({static_cast<int64_t>(values.size())}, dtype);
    for (size_t i = 0; i < values.size(); ++i) set(host, i, values[i]);
    Tensor device = tensor(host.numel(), dtype);
    CUDA_CHECK(
        cudaMemcpy(device.view().raw(), host.view().raw(), host.bytes(), cudaMemcpyHostToDevice));
    return device;
  }
  static std::vector<double> download(TensorView device) {
    const Tensor host(device.shape(), device.dtype());
    CUDA_CHECK(cudaMemcpy(host.view().raw(), device.raw(), host.bytes(), cudaMemcpyDeviceToHost));
    std::vector<double> values(host.numel());
    for (size_t i = 0; i < values.size(); ++i) values[i] = get(host, i);
    return values;
  }

 private:
  static void set(const Tensor& tensor, size_t i, double value) {
    void* raw = tensor.view().raw();
    if (tensor.dtype() == DType::kFloat64) {
      static_cast<double*>(raw)[i] = value;
    } else if (tensor.dtype() == DType::kFloat32) {
      static_cast<float*>(raw)[i] = static_cast<float>(value);
    } else {
      static_cast<uint16_t*>(raw)[i] = bf16_bits(static_cast<float>(value));
    }
  }
  static double get(const Tensor& tensor, size_t i) {
    const void* raw = tensor.view().raw();
    if (tensor.dtype() == DType::kFloat64) return static_cast<const double*>(raw)[i];
    if (tensor.dtype() == DType::kFloat32) return static_cast<const float*>(raw)[i];
    return from_bf16_bits(static_cast<const uint16_t*>(raw)[i]);
  }

  cuda::DeviceAllocator memory_;
  Stream stream_;
};

// What a rank has: its communicator, its GPU, a way to tell the test something, and what the
// communicator was made of.
struct Rank {
  Communicator& comm;
  Gpu& gpu;
  int say;
  const CommunicatorOptions& options;
  Store& store;
  void tell(const std::string& line) const { write_all(say, line + "\n", "pipe"); }
};

double value(int rank, int64_t i) {
  return static_cast<double>((i * 7 + rank * 13) % 101) - 50;
}
std::vector<double> values_of(int rank, int64_t n) {
  std::vector<double> values(n);
  for (int64_t i = 0; i < n; ++i) values[i] = value(rank, i);
  return values;
}

void expect_equal(const std::vector<double>& got, const std::vector<double>& wanted,
                  const std::string& what) {
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (got[i] != wanted[i]) {
      throw Error(what + ": element " + std::to_string(i) + " of " + std::to_string(wanted.size()) +
                  " is " + std::to_string(got[i]) + ", not " + std::to_string(wanted[i]));
    }
  }
}

const int64_t kSizes[] = {1, 7, 1000, 4097, 3'000'001};

void gather(const Rank& rank, DType dtype, bool in_place) {
  const int world = rank.comm.world_size();
  for (const int64_t n : kSizes) {
    const Tensor full = rank.gpu.tensor(n * world, dtype);
    CUDA_CHECK(cudaMemset(full.view().raw(), 0xff, full.bytes()));
    Tensor shard = rank.gpu.upload(values_of(rank.comm.rank(), n), dtype);
    TensorView source = shard;
    if (in_place) {
      source = full.view().slice(rank.comm.rank() * n, (rank.comm.rank() + 1) * n);
      CUDA_CHECK(
          cudaMemcpy(source.raw(), shard.view().raw(), shard.bytes(), cudaMemcpyDeviceToDevice));
    }
    rank.comm.all_gather(full, source)->wait(rank.gpu.stream());
    rank.gpu.synchronize();
    std::vector<double> wanted;
    for (int r = 0; r < world; ++r) {
      const std::vector<double> part = values_of(r, n);
      wanted.insert(wanted.end(), part.begin(), part.end());
    }
    expect_equal(Gpu::download(full), wanted, std::string("all_gather ") + name_of(dtype));
  }
}

void scatter(const Rank& rank, DType dtype, bool in_place) {
  const int world = rank.comm.world_size();
  for (const int64_t n : kSizes) {
    const Tensor full = rank.gpu.upload(values_of(rank.comm.rank(), n * world), dtype);
    const Tensor apart = rank.gpu.tensor(n, dtype);
    const int64_t begin = rank.comm.rank() * n;
    const TensorView shard = in_place ? full.view().slice(begin, begin + n) : apart.view();
    rank.comm.reduce_scatter(shard, full)->wait(rank.gpu.stream());
    rank.gpu.synchronize();
    std::vector<double> wanted(n, 0.0);
    for (int64_t i = 0; i < n; ++i) {
      for (int r = 0; r < world; ++r) wanted[i] += value(r, begin + i);
    }
    expect_equal(Gpu::download(shard), wanted, std::string("reduce_scatter ") + name_of(dtype));
  }
}

void reduce(const Rank& rank, DType dtype) {
  for (const int64_t n : kSizes) {
    const Tensor values = rank.gpu.upload(values_of(rank.comm.rank(), n), dtype);
    rank.comm.all_reduce(values)->wait(Stream::cpu());  // no stream: the host waits
    std::vector<double> wanted(n, 0.0);
    for (int64_t i = 0; i < n; ++i) {
      for (int r = 0; r < rank.comm.world_size(); ++r) wanted[i] += value(r, i);
    }
    expect_equal(Gpu::download(values), wanted, std::string("all_reduce ") + name_of(dtype));
  }
}

void play_values(const Rank& rank) {
  for (const bool in_place : {false, true}) {
    gather(rank, DType::kFloat32, in_place);
    gather(rank, DType::kBFloat16, in_place);
    scatter(rank, DType::kFloat32, in_place);
    scatter(rank, DType::kBFloat16, in_place);
  }
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16}) {
    reduce(rank, dtype);
  }
  rank.comm.all_reduce(rank.gpu.tensor(0, DType::kFloat32))->wait(rank.gpu.stream());
}

// Both ways at once, then one way only, to and from odd addresses.
void play_exchange(const Rank& rank) {
  const int own = rank.comm.rank();
  const int peer = 1 - own;
  for (const int64_t n : {int64_t{1}, int64_t{4097}, int64_t{16} << 20}) {  // up to 64 MiB
    const Tensor mine = rank.gpu.upload(values_of(own, n + own), DType::kFloat32);
    const Tensor theirs = rank.gpu.tensor(n + peer, DType::kFloat32);
    CUDA_CHECK(cudaMemset(theirs.view().raw(), 0xff, theirs.bytes()));
    rank.comm.exchange({{peer, mine}}, {{peer, theirs}})->wait(rank.gpu.stream());
    rank.gpu.synchronize();
    rank.comm.check_alive();
    expect_equal(Gpu::download(theirs), values_of(peer, n + peer), "exchange");
  }
  const int64_t n = 1001;
  for (const int sender : {0, 1}) {
    const Tensor tensor = rank.gpu.upload(values_of(own, n), DType::kBFloat16);
    const TensorView view = tensor.view().slice(3, n);
    const std::vector<Parcel> message{{peer, view}};
    const std::vector<Parcel> none;
    rank.comm.exchange(own == sender ? message : none, own == sender ? none : message)
        ->wait(Stream::cpu());  // no stream: the host waits
    std::vector<double> wanted = values_of(own, n);
    for (int64_t i = 3; i < n; ++i) wanted[i] = value(sender, i);
    expect_equal(Gpu::download(tensor), wanted, "exchange one way");
  }
}

// A rank with nothing to say may leave the call out, make it with no message or with an empty one.
void play_silent_exchange(const Rank& rank) {
  const int peer = 1 - rank.comm.rank();
  const Tensor empty = rank.gpu.tensor(0, DType::kFloat32);
  if (rank.comm.rank() == 0) rank.comm.exchange({}, {})->wait(rank.gpu.stream());
  rank.comm.exchange({{peer, empty}}, {{peer, empty}})->wait(rank.gpu.stream());
  play_exchange(rank);
  const Tensor mine = Tensor::zeros({1}, DType::kUInt8);
  const Tensor theirs = Tensor::zeros({1}, DType::kUInt8);
  mine.data<uint8_t>()[0] = static_cast<uint8_t>(rank.comm.rank() + 1);
  rank.comm.exchange({{peer, mine}}, {{peer, theirs}})->wait(rank.gpu.stream());
  if (theirs.data<uint8_t>()[0] != peer + 1) throw Error("a wrong byte in host memory");
}

// What loaders and the way out of a run do.
void play_host_tensors(const Rank& rank) {
  const Tensor values({1001}, DType::kFloat32);
  for (int64_t i = 0; i < 1001; ++i) values.data<float>()[i] = value(rank.comm.rank(), i);
  rank.comm.all_reduce(values)->wait(rank.gpu.stream());
  for (int64_t i = 0; i < 1001; ++i) {
    if (values.data<float>()[i] != value(0, i) + value(1, i)) throw Error("a wrong sum");
  }
  rank.comm.barrier();
}

// Between what the compute stream writes before and reads after, many at a time and with nothing
// that makes the host wait: slow copies come first, so that a collective that does not wait for
// its stream, or a stream that does not wait for it, meets wrong values. `gather` puts every rank's
// shard into its part of the full tensor.
using Gather = std::function<std::unique_ptr<Work>(const Tensor& full, const Tensor& shard)>;
void play_order(const Rank& rank, const Gather& gather) {
  constexpr int kRounds = 24;
  const int64_t n = 1 << 16;
  const int world = rank.comm.world_size();
  const Tensor slow = rank.gpu.tensor(1 << 26, DType::kFloat32);
  const Tensor slower = rank.gpu.tensor(1 << 26, DType::kFloat32);
  const Tensor shard = rank.gpu.tensor(n, DType::kUInt8);
  const Tensor full = rank.gpu.tensor(n * world, DType::kUInt8);
  std::vector<Tensor> results;
  results.reserve(kRounds);
  for (int round = 0; round < kRounds; ++round) {
    results.push_back(rank.gpu.tensor(n * world, DType::kUInt8));
  }
  for (int round = 0; round < kRounds; ++round) {
    const auto copy = [&](const Tensor& to, const Tensor& from) {
      CUDA_CHECK(cudaMemcpyAsync(to.view().raw(), from.view().raw(), to.bytes(),
                                 cudaMemcpyDeviceToDevice, rank.gpu.handle()));
    };
    for (int i = 0; i < 4; ++i) copy(slow, slower);
    CUDA_CHECK(cudaMemsetAsync(shard.view().raw(), 10 * round + rank.comm.rank(), shard.bytes(),
                               rank.gpu.handle()));
    const auto work = gather(full, shard);
    copy(slow, slower);  // beside it
    work->wait(rank.gpu.stream());
    copy(results[round], full);
    CUDA_CHECK(cudaMemsetAsync(full.view().raw(), 0xee, full.bytes(), rank.gpu.handle()));
  }
  rank.gpu.synchronize();
  rank.comm.check_alive();
  for (int round = 0; round < kRounds; ++round) {
    std::vector<uint8_t> bytes(results[round].bytes());
    CUDA_CHECK(cudaMemcpy(bytes.data(), results[round].view().raw(), bytes.size(),
                          cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < bytes.size(); ++i) {
      if (bytes[i] != static_cast<uint8_t>(10 * round + i / n)) throw Error("out of order");
    }
  }
}

void play_order_of_all_gather(const Rank& rank) {
  play_order(rank, [&](const Tensor& full, const Tensor& shard) {
    return rank.comm.all_gather(full, shard);
  });
}

void play_order_of_exchange(const Rank& rank) {
  play_order(rank, [&](const Tensor& full, const Tensor& shard) {
    const auto part_of = [&](int r) {
      return full.view().slice(r * shard.numel(), (r + 1) * shard.numel());
    };
    const int own = rank.comm.rank();
    const int peer = 1 - own;
    CUDA_CHECK(cudaMemcpyAsync(part_of(own).raw(), shard.view().raw(), shard.bytes(),
                               cudaMemcpyDeviceToDevice, rank.gpu.handle()));
    return rank.comm.exchange({{peer, shard}}, {{peer, part_of(peer)}});
  });
}

// The next generation's communicator is made on another thread while the compute stream has seconds
// of work and a collective of the old one behind that.
void play_next(const Rank& rank) {
  constexpr int kCopies = 900;  // below what a stream takes before the host has to wait
  const Tensor slow = rank.gpu.tensor(int64_t{4} << 30, DType::kUInt8);
  const Tensor slower = rank.gpu.tensor(slow.numel(), DType::kUInt8);
  const Tensor sum = rank.gpu.upload(values_of(rank.comm.rank(), 1001), DType::kFloat32);
  rank.comm.barrier();
  for (int i = 0; i < kCopies; ++i) {
    CUDA_CHECK(cudaMemcpyAsync(slow.view().raw(), slower.view().raw(), slow.bytes(),
                               cudaMemcpyDeviceToDevice, rank.gpu.handle()));
  }
  const auto work = rank.comm.all_reduce(sum);
  const auto next = std::async(std::launch::async, [&] {
                      CUDA_CHECK(cudaSetDevice(rank.gpu.stream().device.index));
                      CommunicatorOptions options = rank.options;
                      options.store_prefix = "next/";
                      return make_communicator(options, rank.store);
                    }).get();
  const cudaError_t busy = cudaStreamQuery(rank.gpu.handle());
  cudaGetLastError();
  if (busy != cudaErrorNotReady) throw Error("made only when the compute stream had nothing to do");
  work->wait(rank.gpu.stream());
  play_exchange({*next, rank.gpu, rank.say, rank.options, rank.store});
  rank.gpu.synchronize();
  rank.comm.check_alive();
  std::vector<double> wanted(1001);
  for (int64_t i = 0; i < 1001; ++i) wanted[i] = value(0, i) + value(1, i);
  expect_equal(Gpu::download(sum), wanted, "all_reduce of the old communicator");
}

void play_without_end(const Rank& rank) {
  const Tensor full = rank.gpu.tensor(int64_t{64} << 20, DType::kUInt8);
  const int64_t n = full.numel() / rank.comm.world_size();
  const TensorView shard = full.view().slice(rank.comm.rank() * n, (rank.comm.rank() + 1) * n);
  CUDA_CHECK(cudaMemset(full.view().raw(), 0, full.bytes()));
  for (int round = 0;; ++round) {
    for (int i = 0; i < 8; ++i) rank.comm.all_gather(full, shard)->wait(rank.gpu.stream());
    rank.gpu.synchronize();
    rank.comm.check_alive();
    if (round == 1) rank.tell("running");
  }
}

// Rank 1 takes no part until it hears that rank 0 has given up.
void play_absent(const Rank& rank, const std::function<void()>& meanwhile) {
  rank.comm.barrier();
  if (rank.comm.rank() == 1) {
    for (const auto begin = Clock::now(); seconds_since(begin) < 20;) {
      rank.comm.check_alive();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    throw Error("nothing heard of rank 0");
  }
  const Tensor values = rank.gpu.tensor(1 << 20, DType::kFloat32);
  const auto work = rank.comm.all_reduce(values);
  meanwhile();
  work->wait(rank.gpu.stream());
  rank.gpu.synchronize();
  rank.comm.check_alive();
  throw Error("a sum that rank 1 took no part in");
}

void play_abort(const Rank& rank) {
  std::future<void> aborter;
  play_absent(rank, [&] {
    aborter = std::async(std::launch::async, [&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      rank.comm.abort("the coordinator ended the generation");
    });
  });
}

void play_timeout(const Rank& rank) {
  play_absent(rank, [] {});
}

void play_departure(const Rank& rank) {
  if (rank.comm.rank() == 1) return;
  const Tensor values = rank.gpu.tensor(1 << 20, DType::kFloat32);
  rank.comm.all_reduce(values)->wait(Stream::cpu());
  throw Error("a sum without rank 1");
}

struct Play {
  std::function<void(const Rank&)> body;
  double timeout_s = 30.0;  // of rank 0
  bool one_gpu = false;     // for all ranks
};
const std::map<std::string, Play>& plays() {
  static const std::map<std::string, Play> all = {
      {"values", {play_values}},
      {"host tensors", {play_host_tensors}},
      {"exchange", {play_exchange}},
      {"silent exchange", {play_silent_exchange}},
      {"order", {play_order_of_all_gather}},
      {"order of exchange", {play_order_of_exchange}},
      {"next", {play_next}},
      {"without end", {play_without_end}},
      {"abort", {play_abort}},
      {"timeout", {play_timeout, 5.0}},
      {"departure", {play_departure}},
      {"one GPU", {[](const Rank&) {}, 30.0, true}},
  };
  return all;
}

// The error of a rank, or "done", and then, once the communicator is gone, how long everything took
// and whether the GPU still works: "made in 0.51 s, closed in 0.1 s, GPU works".
void play(const std::string& name, int rank, int world, const std::string& folder, int say) {
  const Play& chosen = plays().at(name);
  Gpu gpu(chosen.one_gpu ? 0 : rank);
  FolderStore store(folder);
  CommunicatorOptions options;
  options.rank = rank;
  options.world_size = world;
  options.backend = "nccl";
  options.timeout_s = rank == 0 ? chosen.timeout_s : 30.0;
  options.stream = gpu.stream();
  std::string outcome = "done";
  Clock::time_point begin = Clock::now();
  double made_s = 0.0;
  try {
    const auto comm = make_communicator(options, store);
    made_s = seconds_since(begin);
    try {
      chosen.body({*comm, gpu, say, options, store});
    } catch (const TimeoutError& e) {
      outcome = std::string("TimeoutError ") + e.what();
    } catch (const PeerError& e) {
      outcome = std::string("PeerError ") + e.what();
    }
    if (outcome != "done") {
      EXPECT_THROW(comm->all_reduce(gpu.tensor(1, DType::kFloat32)), PeerError);
    }
    write_all(say, outcome + "\n", "pipe");
    begin = Clock::now();
  } catch (const std::exception& e) {
    write_all(say, std::string("error ") + e.what() + "\n", "pipe");
    return;
  }
  const double closed_s = seconds_since(begin);
  const Tensor tensor = gpu.tensor(1 << 20, DType::kFloat32);
  CUDA_CHECK(cudaMemsetAsync(tensor.view().raw(), 0, tensor.bytes(), gpu.handle()));
  gpu.synchronize();
  char line[120];
  std::snprintf(line, sizeof(line), "made in %.2f s, closed in %.1f s, GPU works\n", made_s,
                closed_s);
  write_all(say, line, "pipe");
}

constexpr const char* kRole = "MUSTER_NCCL_TEST_RANK";  // "PLAY:RANK:WORLD:PIPE:FOLDER"

// Turns this program into a rank when it is told to be one.
class RankEnvironment : public ::testing::Environment {
  void SetUp() override {
    const char* role = std::getenv(kRole);
    if (role == nullptr) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    std::vector<std::string> parts;
    std::istringstream text(role);
    for (std::string part; std::getline(text, part, ':');) parts.push_back(part);
    try {
      play(parts.at(0), std::stoi(parts.at(1)), std::stoi(parts.at(2)), parts.at(4),
           std::stoi(parts.at(3)));
    } catch (const std::exception& e) {
      std::fprintf(stderr, "rank %s: %s\n", parts.at(1).c_str(), e.what());
      _exit(1);
    }
    _exit(::testing::Test::HasFailure() ? 1 : 0);
  }
};
const auto* const kEnvironment = ::testing::AddGlobalTestEnvironment(new RankEnvironment);

class RankProcess {
 public:
  RankProcess(const std::string& play, int rank, int world, const std::string& folder) {
    int ends[2];
    MUSTER_CHECK(pipe(ends) == 0);
    hear_ = Fd(ends[0]);
    const Fd write_end(ends[1]);
    fcntl(hear_.get(), F_SETFD, FD_CLOEXEC);
    const std::string role = std::string(kRole) + "=" + play + ":" + std::to_string(rank) + ":" +
                             std::to_string(world) + ":" + std::to_string(write_end.get()) + ":" +
                             folder;
    std::vector<char*> environment;
    for (char** entry = environ; *entry != nullptr; ++entry) environment.push_back(*entry);
    environment.push_back(const_cast<char*>(role.c_str()));
    environment.push_back(nullptr);
    char program[] = "/proc/self/exe";
    char* arguments[] = {program, nullptr};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    MUSTER_CHECK(posix_spawn(&pid_, program, &actions, nullptr, arguments, environment.data()) ==
                 0);
    posix_spawn_file_actions_destroy(&actions);
  }
  ~RankProcess() {
    kill();
    waitpid(pid_, nullptr, 0);
  }
  void kill() const { ::kill(pid_, SIGKILL); }
  // The next line that it says; "" when it has ended or the time is up.
  std::string hear(double seconds = 40.0) const {
    const Deadline deadline = Deadline::after(std::chrono::duration<double>(seconds));
    std::string line;
    pollfd event{hear_.get(), POLLIN, 0};
    while (poll(&event, 1, static_cast<int>(deadline.left().count())) > 0) {
      char c = 0;
      if (read(hear_.get(), &c, 1) != 1) return "";
      if (c == '\n') return line;
      line += c;
    }
    return "";
  }

 private:
  pid_t pid_ = -1;
  Fd hear_;
};

class NcclGpuTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    if (!find_nccl().problem.empty()) GTEST_SKIP() << find_nccl().problem;
  }
  void start(const std::string& play) {
    for (int rank = 0; rank < 2; ++rank) {
      ranks_.push_back(std::make_unique<RankProcess>(play, rank, 2, folder_.path()));
    }
  }
  void expect_done() const {
    for (const auto& rank : ranks_) EXPECT_EQ(rank->hear(), "done");
    expect_closed();
  }
  void expect_closed() const {
    for (const auto& rank : ranks_) {
      const std::string line = rank->hear(15.0);
      std::printf("%s\n", line.c_str());
      EXPECT_THAT(line, HasSubstr("GPU works"));
    }
  }
  TempDir folder_{"nccl_test"};
  std::vector<std::unique_ptr<RankProcess>> ranks_;
};

class NcclTwoGpuTest : public NcclGpuTest {
 protected:
  void SetUp() override {
    NcclGpuTest::SetUp();
    if (!IsSkipped() && cuda::device_count() < 2) GTEST_SKIP() << "two GPUs are needed";
  }
};

TEST_F(NcclTwoGpuTest, ValuesOfEveryCollective) {
  start("values");
  expect_done();
}

TEST_F(NcclTwoGpuTest, HostTensorsAndBarrier) {
  start("host tensors");
  expect_done();
}

TEST_F(NcclTwoGpuTest, Exchange) {
  start("exchange");
  expect_done();
}

TEST_F(NcclTwoGpuTest, ExchangeWithNothingToSay) {
  start("silent exchange");
  expect_done();
}

TEST_F(NcclTwoGpuTest, OrderAmongStreams) {
  start("order");
  expect_done();
}

TEST_F(NcclTwoGpuTest, OrderOfAnExchangeAmongStreams) {
  start("order of exchange");
  expect_done();
}

TEST_F(NcclTwoGpuTest, TheNextCommunicatorDoesNotWaitForTheComputeStream) {
  start("next");
  expect_done();
}

TEST_F(NcclTwoGpuTest, AKilledRankIsNamedAtOnce) {
  start("without end");
  for (const auto& rank : ranks_) ASSERT_EQ(rank->hear(), "running");
  const auto begin = Clock::now();
  ranks_[1]->kill();
  EXPECT_THAT(ranks_[0]->hear(10.0), AllOf(StartsWith("PeerError"), HasSubstr("rank 1")));
  const double heard_s = seconds_since(begin);
  EXPECT_THAT(ranks_[0]->hear(10.0), HasSubstr("GPU works"));
  std::printf("heard of the death after %.3f s\n", heard_s);
}

TEST_F(NcclTwoGpuTest, AbortFromAnotherThreadEndsWhatIsUnderWay) {
  start("abort");
  EXPECT_EQ(ranks_[0]->hear(), "PeerError the coordinator ended the generation");
  EXPECT_THAT(ranks_[1]->hear(5.0), StartsWith("PeerError lost rank 0"));
  expect_closed();
}

TEST_F(NcclTwoGpuTest, APeerThatDoesNotJoinIsATimeout) {
  start("timeout");
  EXPECT_THAT(ranks_[0]->hear(),
              StartsWith("TimeoutError all_reduce of 4194304 bytes: not complete within 5 s"));
  EXPECT_THAT(ranks_[1]->hear(5.0), StartsWith("PeerError lost rank 0"));
  expect_closed();
}

TEST_F(NcclTwoGpuTest, APeerThatLeftIsNotWaitedFor) {
  start("departure");
  EXPECT_EQ(ranks_[1]->hear(), "done");
  EXPECT_EQ(ranks_[0]->hear(10.0), "PeerError all_reduce of 4194304 bytes: rank 1 left");
  expect_closed();
}

TEST_F(NcclGpuTest, TwoRanksOnOneGpuAreRefused) {
  start("one GPU");
  for (const auto& rank : ranks_) {
    EXPECT_THAT(rank->hear(), HasSubstr("ranks 0 and 1 have the same GPU"));
  }
}

TEST_F(NcclGpuTest, OneRankAlone) {
  for (const char* backend : {"nccl", "single"}) {
    Gpu gpu(0);
    testing::InMemoryStore store;
    CommunicatorOptions options;
    options.backend = backend;
    options.stream = gpu.stream();
    const auto comm = make_communicator(options, store);
    const Rank rank{*comm, gpu, -1, options, store};
    for (const bool in_place : {false, true}) {
      gather(rank, DType::kBFloat16, in_place);
      scatter(rank, DType::kFloat32, in_place);
    }
    reduce(rank, DType::kFloat64);
    comm->exchange({}, {})->wait(gpu.stream());
    comm->barrier();
  }
}

}  // namespace
}  // namespace muster
