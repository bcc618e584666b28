#include "worker/comm/nccl_communicator.h"

#include "common/error.h"

#ifdef MUSTER_WITH_NCCL

#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/cuda/check.h"
#include "worker/comm/gloo_communicator.h"
#include "worker/comm/nccl_engine.h"

namespace muster {
namespace {

// What every rank tells every other before NCCL connects them, so that what NCCL would report by
// hanging or in its own terms is reported in ours.
struct Greeting {
  int32_t version;
  char gpu[16];     // UUID
  ncclUniqueId id;  // that of rank 0 counts
};

// NCCL shall listen where Gloo does, on the interface that leads to the peers, unless the user has
// told it otherwise. It asks once in the life of a process.
void choose_interface(const std::string& interface_name, const std::string& route_to) {
  const std::string name = interface_of(local_address(interface_name, route_to));
  if (!name.empty()) setenv("NCCL_SOCKET_IFNAME", ("=" + name).c_str(), 0);
}

class DeviceWork : public Work {
 public:
  DeviceWork(std::shared_ptr<NcclEngine> engine, std::shared_ptr<NcclOperation> operation)
      : engine_(std::move(engine)), operation_(std::move(operation)) {}
  ~DeviceWork() override {
    if (!waited_) engine_->order(*operation_);
  }
  void wait(const Stream& stream) override {
    MUSTER_CHECK(!waited_);
    waited_ = true;
    if (stream.device.is_cpu()) {
      engine_->finish(*operation_);
      return;
    }
    CUDA_CHECK(
        cudaStreamWaitEvent(static_cast<cudaStream_t>(stream.handle), operation_->done(), 0));
    engine_->check_alive();
  }

 private:
  std::shared_ptr<NcclEngine> engine_;
  std::shared_ptr<NcclOperation> operation_;
  bool waited_ = false;
};

ncclDataType_t nccl_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return ncclFloat32;
    case DType::kFloat64:
      return ncclFloat64;
    case DType::kBFloat16:
      return ncclBfloat16;
    default:
      MUSTER_CHECK(false, std::string("no sums of ") + name_of(dtype));
      return ncclNumTypes;
  }
}

// One group of messages: without it, NCCL would make each wait for the one before. Returns its
// first error, otherwise whether the group has taken effect.
ncclResult_t send_and_receive(const std::vector<Parcel>& outgoing,
                              const std::vector<Parcel>& incoming, ncclComm_t communicator,
                              cudaStream_t stream) {
  ncclResult_t error = ncclSuccess;
  const auto note = [&](ncclResult_t status) {
    if (error == ncclSuccess && status != ncclInProgress) error = status;
  };
  note(nccl().GroupStart());
  for (const auto& [peer, view] : outgoing) {
    if (view.bytes() == 0) continue;
    note(nccl().Send(view.raw(), view.bytes(), ncclUint8, peer, communicator, stream));
  }
  for (const auto& [peer, view] : incoming) {
    if (view.bytes() == 0) continue;
    note(nccl().Recv(view.raw(), view.bytes(), ncclUint8, peer, communicator, stream));
  }
  // Also after an error: a group that stays open would take in this thread's next calls.
  const ncclResult_t ended = nccl().GroupEnd();
  return error == ncclSuccess ? ended : error;
}

class NcclCommunicator : public Communicator {
 public:
  NcclCommunicator(const CommunicatorOptions& options, Store& store) : options_(options) {
    choose_interface(options.interface_name, options.route_to);
    nccl();  // before peers are kept waiting
    host_ = std::make_shared<GlooCommunicator>(options, store);
    try {
      connect();
    } catch (const std::exception& e) {
      host_->abort(e.what());
      if (engine_) engine_->close();
      throw;
    }
  }
  ~NcclCommunicator() override { engine_->close(); }

  int rank() const override { return host_->rank(); }
  int world_size() const override { return host_->world_size(); }

  std::unique_ptr<Work> all_gather(TensorView full, ConstTensorView shard) override {
    if (full.device().is_cpu()) return host_->all_gather(full, shard);
    check(full, shard.numel() * world_size());
    check(shard, shard.numel());
    MUSTER_CHECK(full.dtype() == shard.dtype());
    return enqueue("all_gather", full.bytes(), [=](ncclComm_t communicator, cudaStream_t stream) {
      return nccl().AllGather(shard.raw(), full.raw(), shard.bytes(), ncclUint8, communicator,
                              stream);
    });
  }
  std::unique_ptr<Work> reduce_scatter(TensorView shard, TensorView full) override {
    if (full.device().is_cpu()) return host_->reduce_scatter(shard, full);
    check(full, shard.numel() * world_size());
    check(shard, shard.numel());
    MUSTER_CHECK(full.dtype() == shard.dtype() && full.dtype() != DType::kFloat64);
    return enqueue(
        "reduce_scatter", full.bytes(), [=](ncclComm_t communicator, cudaStream_t stream) {
          return nccl().ReduceScatter(full.raw(), shard.raw(), shard.numel(),
                                      nccl_type(full.dtype()), ncclSum, communicator, stream);
        });
  }
  std::unique_ptr<Work> all_reduce(TensorView values) override {
    if (values.device().is_cpu()) return host_->all_reduce(values);
    check(values, values.numel());
    return enqueue("all_reduce", values.bytes(), [=](ncclComm_t communicator, cudaStream_t stream) {
      return nccl().AllReduce(values.raw(), values.raw(), values.numel(), nccl_type(values.dtype()),
                              ncclSum, communicator, stream);
    });
  }
  std::unique_ptr<Work> exchange(std::vector<Parcel> outgoing,
                                 std::vector<Parcel> incoming) override {
    size_t bytes = 0;
    bool on_host = false;
    for (const auto* parcels : {&outgoing, &incoming}) {
      for (const Parcel& parcel : *parcels) {
        bytes += parcel.view.bytes();
        on_host = on_host || parcel.view.device().is_cpu();
      }
    }
    if (on_host) return host_->exchange(std::move(outgoing), std::move(incoming));
    for (const auto* parcels : {&outgoing, &incoming}) {
      check_parcels(*parcels, rank(), world_size(), options_.stream.device);
    }
    check_alive();
    if (bytes == 0) return completed_work();  // NCCL would have nothing to put on the stream
    return enqueue("exchange", bytes, [&](ncclComm_t communicator, cudaStream_t stream) {
      return send_and_receive(outgoing, incoming, communicator, stream);
    });
  }
  void barrier() override { host_->barrier(); }

  void abort(const std::string& reason) noexcept override {
    host_->abort(reason);
    engine_->wake();
  }
  void check_alive() const override { engine_->check_alive(); }
  double wait_seconds() const override { return host_->wait_seconds() + engine_->wait_seconds(); }

 private:
  void connect() {
    int device = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    MUSTER_CHECK(device == options_.stream.device.index, "the stream is of another GPU");
    const std::vector<Greeting> ranks = greet(device);
    for (int other = 0; other < world_size(); ++other) compare(ranks, other);
    engine_ = std::make_shared<NcclEngine>(host_, static_cast<cudaStream_t>(options_.stream.handle),
                                           options_.timeout_s);
    engine_->connect(ranks[0].id);
  }

  std::vector<Greeting> greet(int device) {
    cudaDeviceProp properties{};
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    Greeting own{};
    own.version = nccl().version;
    std::memcpy(own.gpu, properties.uuid.bytes, sizeof(own.gpu));
    if (rank() == 0) {
      if (const ncclResult_t status = nccl().GetUniqueId(&own.id); status != ncclSuccess) {
        throw Error(std::string("NCCL cannot listen for the other ranks: ") +
                    nccl().GetErrorString(status) + " (" + nccl().GetLastError(nullptr) + ")");
      }
    }
    std::vector<Greeting> ranks(world_size());
    const Shape own_bytes{static_cast<int64_t>(sizeof(Greeting))};
    const Shape all_bytes{own_bytes.numel() * world_size()};
    host_
        ->all_gather(TensorView(ranks.data(), DType::kUInt8, all_bytes),
                     ConstTensorView(&own, DType::kUInt8, own_bytes))
        ->wait(Stream::cpu());
    return ranks;
  }

  void compare(const std::vector<Greeting>& ranks, int other) const {
    if (ranks[other].version != ranks[0].version) {
      throw ConfigError("rank " + std::to_string(other) + " has NCCL " +
                        nccl_version_name(ranks[other].version) + " and rank 0 " +
                        nccl_version_name(ranks[0].version) +
                        ": install the same version on every host");
    }
    for (int before = 0; before < other; ++before) {
      if (std::memcmp(ranks[other].gpu, ranks[before].gpu, sizeof(Greeting::gpu)) == 0) {
        throw ConfigError("ranks " + std::to_string(before) + " and " + std::to_string(other) +
                          " have the same GPU: run one worker for each GPU (parallel.workers)");
      }
    }
  }

  void check(ConstTensorView tensor, int64_t numel) const {
    MUSTER_CHECK(tensor.contiguous() && tensor.numel() == numel, tensor.shape().to_string());
    MUSTER_CHECK(tensor.device() == options_.stream.device, "a tensor of another device");
  }

  std::unique_ptr<Work> enqueue(const char* what, size_t bytes, const NcclEngine::Call& call) {
    return std::make_unique<DeviceWork>(engine_, engine_->enqueue(what, bytes, call));
  }

  const CommunicatorOptions options_;
  std::shared_ptr<GlooCommunicator> host_;
  std::shared_ptr<NcclEngine> engine_;
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(const CommunicatorOptions& options,
                                                     Store& store) {
  return std::make_unique<NcclCommunicator>(options, store);
}

NcclReport find_nccl() {
  try {
    return {nccl_version_name(nccl().version), ""};
  } catch (const Error& e) {
    return {"", e.what()};
  }
}

}  // namespace muster

#else

namespace muster {
namespace {
constexpr const char* kNotBuiltIn =
    "this muster was built without NCCL, which training on several GPUs needs: install nccl.h (the "
    "package libnccl-dev, or nvidia-nccl of PyPI) where CUDA's headers are and build again, or run "
    "one worker";
}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(const CommunicatorOptions&, Store&) {
  throw ConfigError(kNotBuiltIn);
}

NcclReport find_nccl() {
  return {"", kNotBuiltIn};
}

}  // namespace muster

#endif  // MUSTER_WITH_NCCL
