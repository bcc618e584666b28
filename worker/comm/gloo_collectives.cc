#include "worker/comm/gloo_collectives.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

namespace muster {
namespace {

// Scratch that all peers together may fill at once, twice (one half is summed while the other
// arrives).
constexpr int64_t kScratchBytes = 8 << 20;
// Vectors up to this size are sent whole to everybody: one round instead of two.
constexpr int64_t kSmallBytes = 16 << 10;

// sum[i] = Σ over terms, in their order. Fixed-size blocks, so that the compiler vectorises.
template <typename T>
void sum_in_order(T* sum, const std::vector<const T*>& terms, int64_t n) {
  constexpr int64_t kBlock = 64;
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    T block[kBlock];
    std::memcpy(block, terms[0] + i, sizeof(block));
    for (size_t t = 1; t < terms.size(); ++t) {
      const T* term = terms[t] + i;
      for (int64_t j = 0; j < kBlock; ++j) block[j] += term[j];
    }
    std::memcpy(sum + i, block, sizeof(block));
  }
  for (; i < n; ++i) {
    T value = terms[0][i];
    for (size_t t = 1; t < terms.size(); ++t) value += terms[t][i];
    sum[i] = value;
  }
}

// Rank r's part [begin(r), end(r)) of a vector of `total` elements cut into parts of `part`.
struct Parts {
  int64_t total;
  int64_t part;
  int64_t begin(int rank) const { return std::min(rank * part, total); }
  int64_t size(int rank) const { return std::min(part, total - begin(rank)); }
};

// sum[0, parts.size(rank)) = Σ over ranks of their `values` in this rank's part, chunk by chunk:
// while one chunk is summed, the next arrives. `sum` may be this rank's part of `values`.
template <typename T>
void reduce_own_part(GlooMesh& mesh, const char* what, T* sum, const T* values, const Parts& parts,
                     Deadline deadline) {
  const int world = mesh.world_size();
  const int own = mesh.rank();
  const int64_t chunk =
      std::clamp<int64_t>(kScratchBytes / (world * static_cast<int64_t>(sizeof(T))), 1, parts.part);
  const Tensor scratch({2, world, chunk}, dtype_of<T>());
  const auto scratch_of = [&](int64_t round, int peer) {
    return scratch.data<T>() + ((round % 2) * world + peer) * chunk;
  };
  const auto size_in = [&](int64_t round, int rank) {
    return std::clamp<int64_t>(parts.size(rank) - round * chunk, 0, chunk);
  };

  const int64_t rounds = (parts.part + chunk - 1) / chunk;
  std::optional<Exchange> under_way[2];
  const auto start = [&](int64_t round) {
    Exchange& exchange = under_way[round % 2].emplace(mesh, what);
    for (int i = 1; i < world; ++i) {
      const int from = (own + world - i) % world;
      exchange.receive(from, scratch_of(round, from), size_in(round, own) * sizeof(T));
    }
    for (int i = 1; i < world; ++i) {
      const int to = (own + i) % world;
      exchange.send(to, values + parts.begin(to) + round * chunk, size_in(round, to) * sizeof(T));
    }
    exchange.start();
  };
  start(0);
  for (int64_t round = 0; round < rounds; ++round) {
    if (round + 1 < rounds) start(round + 1);
    under_way[round % 2]->finish(deadline);
    std::vector<const T*> terms(world);
    for (int peer = 0; peer < world; ++peer) {
      terms[peer] =
          peer == own ? values + parts.begin(own) + round * chunk : scratch_of(round, peer);
    }
    sum_in_order(sum + round * chunk, terms, size_in(round, own));
  }
}

// Every rank's part of `values` to everybody.
void share_parts(GlooMesh& mesh, const char* what, char* values, size_t element, const Parts& parts,
                 Deadline deadline) {
  const int world = mesh.world_size();
  const int own = mesh.rank();
  Exchange exchange(mesh, what);
  for (int i = 1; i < world; ++i) {
    const int from = (own + world - i) % world;
    exchange.receive(from, values + parts.begin(from) * element, parts.size(from) * element);
  }
  for (int i = 1; i < world; ++i) {
    exchange.send((own + i) % world, values + parts.begin(own) * element,
                  parts.size(own) * element);
  }
  exchange.start();
  exchange.finish(deadline);
}

template <typename T>
void all_reduce_of(GlooMesh& mesh, T* values, int64_t n, Deadline deadline) {
  const int world = mesh.world_size();
  if (n * static_cast<int64_t>(sizeof(T)) > kSmallBytes) {
    const Parts parts{n, (n + world - 1) / world};
    reduce_own_part(mesh, "all_reduce", values + parts.begin(mesh.rank()), values, parts, deadline);
    share_parts(mesh, "all_reduce", reinterpret_cast<char*>(values), sizeof(T), parts, deadline);
    return;
  }
  const Tensor all({world, n}, dtype_of<T>());
  std::memcpy(all.data<T>() + mesh.rank() * n, values, n * sizeof(T));
  share_parts(mesh, "all_reduce", static_cast<char*>(all.view().raw()), sizeof(T), {world * n, n},
              deadline);
  std::vector<const T*> terms(world);
  for (int rank = 0; rank < world; ++rank) terms[rank] = all.data<T>() + rank * n;
  sum_in_order(values, terms, n);
}

}  // namespace

void all_gather(GlooMesh& mesh, TensorView full, ConstTensorView shard, Deadline deadline) {
  const int64_t n = shard.numel();
  MUSTER_CHECK(full.contiguous() && shard.contiguous() && full.dtype() == shard.dtype());
  MUSTER_CHECK(full.numel() == n * mesh.world_size(), full.shape().to_string());
  char* own = static_cast<char*>(full.raw()) + mesh.rank() * shard.bytes();
  if (n > 0 && own != shard.raw()) std::memcpy(own, shard.raw(), shard.bytes());
  share_parts(mesh, "all_gather", static_cast<char*>(full.raw()), size_of(full.dtype()),
              {full.numel(), n}, deadline);
}

void reduce_scatter(GlooMesh& mesh, TensorView shard, TensorView full, Deadline deadline) {
  const int64_t n = shard.numel();
  MUSTER_CHECK(full.contiguous() && shard.contiguous());
  MUSTER_CHECK(full.numel() == n * mesh.world_size(), full.shape().to_string());
  if (n == 0) return;
  reduce_own_part(mesh, "reduce_scatter", shard.data<float>(), full.data<float>(),
                  {full.numel(), n}, deadline);
}

void all_reduce(GlooMesh& mesh, TensorView values, Deadline deadline) {
  MUSTER_CHECK(values.contiguous());
  if (values.numel() == 0) return;
  if (values.dtype() == DType::kFloat64) {
    all_reduce_of(mesh, values.data<double>(), values.numel(), deadline);
  } else {
    all_reduce_of(mesh, values.data<float>(), values.numel(), deadline);
  }
}

void exchange(GlooMesh& mesh, const std::vector<Parcel>& outgoing,
              const std::vector<Parcel>& incoming, Deadline deadline) {
  Exchange exchange(mesh, "exchange");
  for (const auto& [peer, view] : incoming) exchange.receive(peer, view.raw(), view.bytes());
  for (const auto& [peer, view] : outgoing) exchange.send(peer, view.raw(), view.bytes());
  exchange.start();
  exchange.finish(deadline);
}

void barrier(GlooMesh& mesh, Deadline deadline) {
  std::vector<char> tokens(mesh.world_size());
  share_parts(mesh, "barrier", tokens.data(), 1, {mesh.world_size(), 1}, deadline);
}

}  // namespace muster
