// Collectives among the workers of one generation. Implementations: SingleCommunicator (one
// worker), GlooCommunicator (CPU, TCP), NcclCommunicator (GPUs); MPI fits behind the same
// interface.
//
// Every rank calls the same collectives in the same order, from one thread. A call only enqueues;
// the buffers belong to the communicator until the returned Work is waited for. Results are a
// function of inputs and world size alone (fixed order of sums).
//
// Tensors lie in host memory or on the options' GPU. A collective of GPU tensors begins when the
// options' stream has done what was enqueued on it before the call, and runs beside what follows.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/deadline.h"
#include "common/tensor.h"

namespace muster {

class Interrupt;

// A message of exchange(): what a peer is sent, or where what it sends is put.
struct Parcel {
  int peer;
  TensorView view;  // contiguous, any dtype
};

// A collective under way. One that is dropped without wait() is ordered before whatever follows on
// the options' stream (host tensors: the destructor waits).
class Work {
 public:
  virtual ~Work() = default;
  // GPU tensors and a CUDA stream: makes `stream` wait for the result and returns at once; whether
  // the collective failed later on, check_alive() tells. Otherwise returns when the result is
  // there. Throws PeerError naming the rank (if known) when a peer is gone, TimeoutError at the
  // communicator's timeout. Call once.
  virtual void wait(const Stream& stream) = 0;
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  // full[r · n, (r + 1) · n) = shard of rank r, for every r; n = shard.numel(), full.numel() = W ·
  // n. Contiguous, any dtype. `shard` may be this rank's own part of `full`.
  virtual std::unique_ptr<Work> all_gather(TensorView full, ConstTensorView shard) = 0;
  // shard = Σ over ranks of their full[rank · n, (rank + 1) · n). Contiguous, float32; on GPUs also
  // bfloat16, rounded after each addition. `shard` may be this rank's own part of `full`; the rest
  // of `full` may be used as scratch.
  virtual std::unique_ptr<Work> reduce_scatter(TensorView shard, TensorView full) = 0;
  // Sums in place on every rank, bitwise the same everywhere. float32 or float64; on GPUs also
  // bfloat16.
  virtual std::unique_ptr<Work> all_reduce(TensorView values) = 0;
  // Messages from rank to rank that all travel at the same time: the bytes of a rank's outgoing
  // view for a peer are those of that peer's incoming view for the rank. At most one message each
  // way and peer, none to itself. Both ends agree on the number of bytes (shapes and dtypes are
  // their own; no bytes are no message) and on the kind of memory, which is one for all views of a
  // call. No incoming view overlaps another view. The call has the same place among the collectives
  // of all ranks, but a rank with nothing to send or receive may leave it out. The timeout is for
  // all messages together.
  virtual std::unique_ptr<Work> exchange(std::vector<Parcel> outgoing,
                                         std::vector<Parcel> incoming) = 0;
  // Returns when every rank has called it. Orders no GPU work.
  virtual void barrier() = 0;

  // Ends every collective under way, here and (by the broken connections) on the peers, with
  // PeerError(reason). Returns at once; kernels under way end within seconds, their results are
  // undefined. Thread-safe; later calls throw.
  virtual void abort(const std::string& reason) noexcept = 0;
  // Throws what ended the communicator: PeerError with the reason of abort() or naming the lost
  // rank, TimeoutError naming the collective that took too long. A result on a GPU counts only if
  // this passes after the stream that waited for it has reached that point. Thread-safe.
  virtual void check_alive() const = 0;
  // Seconds that the host has been blocked, in total. What a GPU's stream waited is not in it: that
  // takes events of the caller's around wait().
  virtual double wait_seconds() const = 0;
};

// For implementations. Work that is complete, with nothing to wait for.
std::unique_ptr<Work> completed_work();
// For implementations of exchange(): checks that one side of it, `parcels`, has at most one for
// each peer, that the peers are other ranks, and that the views are contiguous and lie on `device`.
void check_parcels(const std::vector<Parcel>& parcels, int rank, int world_size, Device device);

// Where ranks find each other: a key-value store that all of them reach.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Waits for the key. Throws TimeoutError naming key and store.
  virtual std::string get(const std::string& key, Deadline deadline) = 0;
};

struct CommunicatorOptions {
  int rank = 0;
  int world_size = 1;
  std::string backend = "auto";  // auto | gloo | nccl | single, as parallel.backend
  std::string interface_name;    // network interface, "" = chosen by `route_to`
  std::string route_to;  // host of the coordinator; the address that the kernel would use to reach
                         // it is taken; "" = loopback
  std::string store_prefix;  // keeps generations apart
  // What errors call the ranks, for a communicator of some ranks of a larger world; empty: by their
  // rank.
  std::vector<int> names = {};
  double timeout_s = 60.0;  // of every collective and of the rendezvous
  // Of the rendezvous, where others may come later than that; 0: the same.
  double rendezvous_timeout_s = 0.0;
  // Ends the rendezvous, and later what the communicator has under way, with its reason.
  std::shared_ptr<Interrupt> interrupt = nullptr;
  // The stream that computes what is sent and uses what arrives; its device is where GPU tensors
  // lie, and must be the current one of every thread that calls the communicator.
  Stream stream = {};
};
// "auto": single for one worker, nccl on GPUs, gloo on CPUs. Collective. Throws ConfigError for a
// backend that does not fit, or a GPU that two ranks share; PeerError or TimeoutError naming the
// ranks that did not come; Error where NCCL is not installed.
std::unique_ptr<Communicator> make_communicator(const CommunicatorOptions& options, Store& store);

}  // namespace muster
