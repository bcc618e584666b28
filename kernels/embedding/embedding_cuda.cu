// Forward moves 2 activations an element. Backward, with the tokens in order of their ids
// (token_order_cuda.h; equal ids in order of n): reads every row of grad_out once and reads and
// writes the row of every id that occurs once. A run of equal ids is summed in order by one thread
// a column, so nothing is atomic and the result is a function of the inputs alone; long runs
// (frequent tokens) are cut into pieces whose partial sums are added in order.
#include <algorithm>

#include "kernels/cuda/dependent_launch.cuh"
#include "kernels/cuda/vec.cuh"
#include "kernels/embedding/embedding.h"
#include "kernels/embedding/token_order_cuda.h"

namespace muster::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kCopies = 2;
constexpr int kSumThreads = 128;
constexpr int kPiece = 32;  // tokens of a piece of the order
constexpr int kLong = 8;    // rows in flight for a thread inside a run,
constexpr int kShort = 2;   // and where runs end: their rows of grad_weight are in flight too
constexpr uint32_t kNoId = ~uint32_t{0};

// Division of numbers below 2^31 by one that is known on the host, by multiplication.
struct Divisor {
  uint32_t value;
  uint32_t multiplier;
  int shift;  // of the product, beyond 32

  explicit Divisor(uint32_t d) : value(d), multiplier(0), shift(-1) {
    // With 2^shift >= d > 2^(shift - 1), multiplier = ⌈2^(31 + shift) / d⌉ fits 32 bits and is
    // exact for numbers below 2^31 (Granlund and Montgomery, 1994).
    int log = 0;
    while ((uint64_t{1} << log) < d) ++log;
    if (d == 1) return;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + log)) + d - 1) / d);
    shift = log - 1;
  }
  __device__ uint32_t divide(uint32_t n) const {
    return shift < 0 ? n : __umulhi(n, multiplier) >> shift;
  }
};

// A thread copies kCopies packs, counted through all rows. Results go past the caches, which are
// for the rows of frequent tokens.
template <typename T, int W>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(T* out, const T* weight, const int32_t* ids, uint32_t count,
                   const Divisor packs) {
  const uint32_t begin = blockIdx.x * (kThreads * kCopies) + threadIdx.x;
  Raw<T, W> data[kCopies];
#pragma unroll
  for (int k = 0; k < kCopies; ++k) {
    const uint32_t at = begin + k * kThreads;
    if (at >= count) break;
    const uint32_t n = packs.divide(at);
    const uint32_t pack = at - n * packs.value;
    data[k] = Raw<T, W>::load(weight + (static_cast<int64_t>(ids[n]) * packs.value + pack) * W);
  }
#pragma unroll
  for (int k = 0; k < kCopies; ++k) {
    const uint32_t at = begin + k * kThreads;
    if (at < count) data[k].store_streaming(out + static_cast<int64_t>(at) * W);
  }
}

// Tokens in order of their ids.
struct Order {
  const TokenOfId* items;
  int64_t count;

  __device__ TokenOfId operator[](int64_t i) const {
    return i >= 0 && i < count ? items[i] : TokenOfId{0, kNoId};
  }
};

// A run belongs to the piece of the order in which it begins. If it ends in that piece or the next,
// the piece's block sums all of it and adds it to its row. Else it is wide: every piece that it
// touches writes a partial sum. partial [pieces, 2, width]: [0] of the wide run that began before
// the piece, [1] of the one that begins in it and goes on.
template <typename T, int W>
__global__ void __launch_bounds__(kSumThreads)
    sum_kernel(float* grad_weight, float* partial, const T* grad_out, const Order order,
               int64_t width) {
  // The piece before with one token more, this one, the next one and one token more.
  __shared__ uint32_t all_ids[3 * kPiece + 2];
  __shared__ uint32_t tokens[2 * kPiece];
  wait_for_kernel_ahead();
  let_next_kernel_start();
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kPiece;
  for (int i = threadIdx.x; i < 3 * kPiece + 2; i += blockDim.x) {
    const int at = i - kPiece - 1;
    const TokenOfId item = order[begin + at];
    all_ids[i] = item.id;
    if (at >= 0 && at < 2 * kPiece) tokens[at] = item.token;
  }
  __syncthreads();
  const uint32_t* ids = all_ids + kPiece + 1;
  const int64_t column =
      (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * static_cast<int64_t>(W);
  if (column >= width) return;

  int i = 0;
  bool first_is_wide = false;
  if (ids[-1] == ids[0]) {
    first_is_wide = ids[-kPiece - 1] == ids[0] || ids[kPiece] == ids[0];
    while (!first_is_wide && i < kPiece && ids[i] == ids[-1]) ++i;  // the piece before does it
  }
  int end = static_cast<int>(min(order.count - begin, static_cast<int64_t>(kPiece)));
  bool last_is_wide = false;
  const uint32_t last = ids[kPiece - 1];
  if (last != kNoId && ids[kPiece] == last && !(ids[-1] == ids[0] && ids[0] == last)) {
    last_is_wide = ids[2 * kPiece] == last;
    while (!last_is_wide && ids[end] == last) ++end;
  }

  const auto row = [&](int j) {
    return grad_out + static_cast<int64_t>(tokens[j]) * width + column;
  };
  const auto target = [&](int j) {
    return grad_weight + static_cast<int64_t>(ids[j]) * width + column;
  };
  // Whether the run of token j is added to its row; known where the run ends.
  const auto is_whole = [&](int j) {
    return ids[j + 1] != ids[j] && !(first_is_wide && ids[j] == ids[0]);
  };
  Pack<float, W> sum{};
  const auto add = [&](const Raw<T, W>& raw) {
    const auto pack = raw.unpack();
#pragma unroll
    for (int c = 0; c < W; ++c) sum.x[c] += pack.x[c];
  };
  const auto finish = [&](int j, const Pack<float, W>& before) {
    if (is_whole(j)) {
#pragma unroll
      for (int c = 0; c < W; ++c) sum.x[c] += before.x[c];
      sum.store(target(j));
    } else {
      const int slot = first_is_wide && ids[j] == ids[0] ? 0 : 1;
      sum.store(partial + (static_cast<int64_t>(blockIdx.x) * 2 + slot) * width + column);
    }
    sum = {};
  };
  while (i < end) {
    if (i + kLong <= end && ids[i + kLong - 1] == ids[i]) {
      Raw<T, W> rows[kLong];
#pragma unroll
      for (int k = 0; k < kLong; ++k) rows[k] = Raw<T, W>::load(row(i + k));
#pragma unroll
      for (int k = 0; k < kLong; ++k) add(rows[k]);
      i += kLong;
      if (ids[i] != ids[i - 1] || i == end) {
        finish(i - 1, is_whole(i - 1) ? Pack<float, W>::load(target(i - 1)) : Pack<float, W>{});
      }
      continue;
    }
    Raw<T, W> rows[kShort];
    Pack<float, W> before[kShort];
#pragma unroll
    for (int k = 0; k < kShort; ++k) {
      if (i + k >= end) break;
      rows[k] = Raw<T, W>::load(row(i + k));
      if (is_whole(i + k)) before[k] = Pack<float, W>::load(target(i + k));
    }
#pragma unroll
    for (int k = 0; k < kShort; ++k) {
      if (i + k >= end) break;
      add(rows[k]);
      if (ids[i + k + 1] != ids[i + k] || i + k + 1 == end) finish(i + k, before[k]);
    }
    i += kShort;
  }
}

constexpr int kJoinWarps = 8;
constexpr int kManyPieces = 8;  // a run of more pieces is summed by the whole block

// Adds up wide runs. Block (32, kJoinWarps): 32 · W columns; a warp looks at one piece for a wide
// run that begins there.
template <int W>
__global__ void __launch_bounds__(32 * kJoinWarps)
    join_kernel(float* grad_weight, const float* partial, const Order order, int64_t width) {
  __shared__ alignas(16) float shared[kJoinWarps][32 * W];
  __shared__ int run_pieces[kJoinWarps];  // of the runs left to the block, else 0
  __shared__ uint32_t run_ids[kJoinWarps];
  wait_for_kernel_ahead();
  const int64_t first_piece = static_cast<int64_t>(blockIdx.x) * kJoinWarps;
  const int64_t column =
      (static_cast<int64_t>(blockIdx.y) * 32 + threadIdx.x) * static_cast<int64_t>(W);
  const bool inside = column < width;
  const auto id_of_border = [&](int64_t piece) { return order[piece * kPiece].id; };
  // Adds pieces from, from + step, … of the run that begins in `piece`.
  const auto add_pieces = [&](int64_t piece, int from, int step, int pieces) {
    Pack<float, W> sum{};
    if (!inside) return sum;
#pragma unroll 8
    for (int p = from; p < pieces; p += step) {
      const auto pack = Pack<float, W>::load(partial + (piece + 1 + p) * 2 * width + column);
#pragma unroll
      for (int c = 0; c < W; ++c) sum.x[c] += pack.x[c];
    }
    return sum;
  };
  // Adds the run's partial sums to its row; `rest` is called behind the loads here.
  const auto finish = [&](int64_t piece, uint32_t id, auto rest) {
    if (!inside) return;
    float* to = grad_weight + static_cast<int64_t>(id) * width + column;
    auto total = Pack<float, W>::load(to);
    const auto begun = Pack<float, W>::load(partial + (piece * 2 + 1) * width + column);
    const Pack<float, W> others = rest();
#pragma unroll
    for (int c = 0; c < W; ++c) total.x[c] += begun.x[c] + others.x[c];
    total.store(to);
  };

  // Loaded at once, whether they will be needed or not: the kernel is as long as its chain of
  // loads.
  const int64_t piece = first_piece + threadIdx.y;
  const uint32_t run = id_of_border(piece + 1);
  const uint32_t before_border = order[(piece + 1) * kPiece - 1].id;
  const uint32_t before_piece = order[piece * kPiece - 1].id;
  const uint32_t next = id_of_border(piece + 2);
  const uint32_t coming = id_of_border(piece + 1 + threadIdx.x);
  int pieces = 0;  // that the run fills or ends in, behind the one where it begins
  if (run != kNoId && before_border == run && next == run && before_piece != run) {
    int more = __popc(__ballot_sync(0xffffffffu, coming == run));
    pieces = more;
    while (more == 32) {
      more =
          __popc(__ballot_sync(0xffffffffu, id_of_border(piece + 1 + pieces + threadIdx.x) == run));
      pieces += more;
    }
  }
  const bool many = pieces > kManyPieces;
  if (threadIdx.x == 0) {
    run_pieces[threadIdx.y] = many ? pieces : 0;
    run_ids[threadIdx.y] = run;
  }
  if (pieces > 0 && !many) {
    finish(piece, run, [&] { return add_pieces(piece, 0, 1, pieces); });
  }
  __syncthreads();
  for (int w = 0; w < kJoinWarps; ++w) {
    if (run_pieces[w] == 0) continue;
    add_pieces(first_piece + w, threadIdx.y, kJoinWarps, run_pieces[w])
        .store(&shared[threadIdx.y][threadIdx.x * W]);
    __syncthreads();
    if (threadIdx.y == 0) {
      finish(first_piece + w, run_ids[w], [&] {
        Pack<float, W> rest{};
        for (int y = 0; y < kJoinWarps; ++y) {
#pragma unroll
          for (int c = 0; c < W; ++c) rest.x[c] += shared[y][threadIdx.x * W + c];
        }
        return rest;
      });
    }
    __syncthreads();
  }
}

}  // namespace

void embedding_forward(const Stream& stream, TensorView out, ConstTensorView weight,
                       ConstTensorView ids) {
  const int64_t tokens = out.size(0);
  const int64_t width = out.size(1);
  if (tokens == 0) return;
  with_activation(out.dtype(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kWidth = 16 / sizeof(T);
    const bool vector = width % kWidth == 0 && rows_aligned(out) && rows_aligned(weight);
    const int64_t packs = width / (vector ? kWidth : 1);
    // Counted in 31 bits: more is done in parts.
    const int64_t most = std::max<int64_t>((int64_t{1} << 31) / packs - 1, 1);
    const auto launch = [&](auto kernel) {
      for (int64_t begin = 0; begin < tokens; begin += most) {
        const int64_t count = std::min(most, tokens - begin) * packs;
        kernel<<<static_cast<unsigned>(ceil_div(count, kThreads * kCopies)), kThreads, 0,
                 handle_of(stream)>>>(static_cast<T*>(out.raw()) + begin * width,
                                      static_cast<const T*>(weight.raw()),
                                      ids.data<int32_t>() + begin, static_cast<uint32_t>(count),
                                      Divisor(static_cast<uint32_t>(packs)));
      }
    };
    if (vector) {
      launch(forward_kernel<T, kWidth>);
    } else {
      launch(forward_kernel<T, 1>);
    }
  });
  CUDA_CHECK(cudaGetLastError());
}

void embedding_order(const Stream& stream, TensorView order, ConstTensorView ids, int64_t vocab) {
  const int64_t tokens = ids.size(0);
  if (tokens == 0) return;
  sort_tokens(stream, static_cast<TokenOfId*>(order.raw()), ids.data<int32_t>(), tokens, vocab,
              workspace(stream, Scratch::kOp, token_sort_bytes(tokens, vocab)));
}

void embedding_backward(const Stream& stream, TensorView grad_weight, ConstTensorView grad_out,
                        ConstTensorView ids, ConstTensorView order) {
  const int64_t tokens = grad_out.size(0);
  const int64_t width = grad_out.size(1);
  const int64_t vocab = grad_weight.size(0);
  if (tokens == 0) return;
  const int64_t pieces = ceil_div(tokens, kPiece);
  // One block: partial sums and, where the order is made here, it and what the sort needs.
  const auto partial_bytes = static_cast<size_t>(
      ceil_div(pieces * 2 * width * static_cast<int64_t>(sizeof(float)), 256) * 256);
  const auto order_bytes =
      static_cast<size_t>(ceil_div(tokens * static_cast<int64_t>(sizeof(TokenOfId)), 256) * 256);
  const size_t own_order_bytes =
      order.defined() ? 0 : order_bytes + token_sort_bytes(tokens, vocab);
  auto* memory =
      static_cast<char*>(workspace(stream, Scratch::kOp, partial_bytes + own_order_bytes));
  auto* partial = reinterpret_cast<float*>(memory);
  Order sorted{static_cast<const TokenOfId*>(order.raw()), tokens};
  if (!order.defined()) {
    auto* own = reinterpret_cast<TokenOfId*>(memory + partial_bytes);
    sort_tokens(stream, own, ids.data<int32_t>(), tokens, vocab,
                memory + partial_bytes + order_bytes);
    sorted.items = own;
  }
  float* to = grad_weight.data<float>();
  with_activation(grad_out.dtype(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kWidth = 16 / sizeof(T);
    const bool vector = width % kWidth == 0 && rows_aligned(grad_out) && rows_aligned(grad_weight);
    const int64_t packs = width / (vector ? kWidth : 1);
    const auto threads =
        static_cast<unsigned>(std::min<int64_t>(ceil_div(packs, 32) * 32, kSumThreads));
    const dim3 grid(static_cast<unsigned>(pieces), static_cast<unsigned>(ceil_div(packs, threads)));
    const auto* from = static_cast<const T*>(grad_out.raw());
    if (vector) {
      launch_behind(stream, sum_kernel<T, kWidth>, grid, threads, to, partial, from, sorted, width);
    } else {
      launch_behind(stream, sum_kernel<T, 1>, grid, threads, to, partial, from, sorted, width);
    }
  });
  const bool vector = width % 4 == 0 && rows_aligned(grad_weight);
  const dim3 grid(static_cast<unsigned>(ceil_div(pieces, kJoinWarps)),
                  static_cast<unsigned>(ceil_div(width, vector ? 128 : 32)));
  launch_behind(stream, vector ? join_kernel<4> : join_kernel<1>, grid, dim3(32, kJoinWarps), to,
                static_cast<const float*>(partial), sorted, width);
}

}  // namespace muster::cuda
