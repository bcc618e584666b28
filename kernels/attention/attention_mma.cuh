// Building blocks of the tensor-core attention kernels: tiles of 16-bit rows in shared memory,
// fragments of mma.sync m16n8k16 (sm_80 and newer) and what they hold.
//
// A tile is [rows, D] of T, bf16 or __half, with D 64 or 128; the 16-byte chunk c of row r lies at
// chunk c ^ (r % 8), so that the eight rows which an ldmatrix reads fall into different banks.
// Heads narrower than D (a multiple of 8) are filled up with zeros, which change no sum.
//
// Accumulator c[4] of a 16×8 product, in lane l: rows l/4 and l/4 + 8, columns 2·(l%4) and the
// next:
// {(row, col), (row, col+1), (row+8, col), (row+8, col+1)}.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/band.h"
#include "kernels/cuda/copy_async.cuh"
#include "kernels/cuda/vec.cuh"

namespace muster::cuda {

constexpr float kLog2e = 1.4426950408889634f;

// What kernels are compiled for: the 16-bit type, the tiles' columns, whether a window bounds what
// is seen on the left.
template <typename T, int D, bool kLeft>
struct Variant {};
// Calls f with the variant that serves a call.
template <typename F>
void with_variant(DType dtype, const AttentionArgs& args, F f) {
  const auto with_bound = [&]<typename T, int D>() {
    if (args.left < kUnbounded) {
      f(Variant<T, D, true>());
    } else {
      f(Variant<T, D, false>());
    }
  };
  const auto with_width = [&]<typename T>() {
    if (args.width <= 64) {
      with_bound.template operator()<T, 64>();
    } else {
      with_bound.template operator()<T, 128>();
    }
  };
  if (dtype == DType::kFloat16) {
    with_width.template operator()<__half>();
  } else {
    MUSTER_CHECK(dtype == DType::kBFloat16, name_of(dtype));
    with_width.template operator()<bf16>();
  }
}

template <int D>
__device__ inline uint32_t tile_offset(int row, int chunk) {
  return static_cast<uint32_t>(row * D * 2 + ((chunk ^ (row & 7)) << 4));
}

// Rows [0, kRows) of a strided matrix into a tile; rows from `rows` on and columns from `width` on
// become zero.
template <int kRows, int D, int kThreads, typename T>
__device__ void load_tile(uint32_t tile, const T* from, int64_t stride, int rows, int width) {
  constexpr int kChunks = D / 8;
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks;
    const int chunk = i % kChunks;
    const bool valid = row < rows && chunk * 8 < width;
    copy16_async(tile + tile_offset<D>(row, chunk), valid ? from + row * stride + chunk * 8 : from,
                 valid);
  }
}

__device__ inline void ldmatrix(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ inline void ldmatrix_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// The left operand: rows [row, row + 16), columns [16 k, 16 k + 16) of a tile.
template <int D>
__device__ void load_left(uint32_t (&r)[4], uint32_t tile, int row, int k) {
  const int lane = threadIdx.x % 32;
  ldmatrix(r, tile + tile_offset<D>(row + lane % 16, 2 * k + lane / 16));
}
// The right operand of X · tileᵀ for 16 rows of the tile from `row` (two column blocks of the
// product): {r0, r1} and {r2, r3}.
template <int D>
__device__ void load_right_rows(uint32_t (&r)[4], uint32_t tile, int row, int k) {
  const int lane = threadIdx.x % 32;
  ldmatrix(r, tile + tile_offset<D>(row + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
}
// The right operand of X · tile for rows [16 k, 16 k + 16) and columns [column, column + 16).
template <int D>
__device__ void load_right_columns(uint32_t (&r)[4], uint32_t tile, int k, int column) {
  const int lane = threadIdx.x % 32;
  ldmatrix_transposed(r, tile + tile_offset<D>(16 * k + lane % 16, column / 8 + lane / 16));
}

// c += a · b, not volatile, so that the compiler may interleave products with arithmetic.
template <typename T>
__device__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, bf16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

template <typename T>
__device__ uint32_t pack_pair(float low, float high) {
  if constexpr (std::is_same_v<T, bf16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

// Two accumulators (columns [16 k, 16 k + 16) of a product) as a left operand.
template <typename T>
__device__ void to_left(uint32_t (&a)[4], const float (&low)[4], const float (&high)[4]) {
  a[0] = pack_pair<T>(low[0], low[1]);
  a[1] = pack_pair<T>(low[2], low[3]);
  a[2] = pack_pair<T>(high[0], high[1]);
  a[3] = pack_pair<T>(high[2], high[3]);
}

// 2^x, 2 units in the last place; 0 at −∞.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// What of the scores of `rows` queries from `row` on and `keys` keys from `key` on is seen, where
// query i lies at key i + offset and sees a.left keys before that and a.right behind. Kernels are
// compiled with and without kLeft, a bound on the left, because they have no registers to spare.
template <bool kLeft>
__device__ bool sees_any(const AttentionArgs& a, int row, int rows, int key, int keys, int offset) {
  return key <= row + rows - 1 + offset + a.right &&
         (!kLeft || key + keys - 1 >= row + offset - a.left);
}
template <bool kLeft>
__device__ bool sees_all(const AttentionArgs& a, int row, int rows, int key, int keys, int offset) {
  return key + keys - 1 <= row + offset + a.right &&
         (!kLeft || key >= row + rows - 1 + offset - a.left);
}

// The same for the accumulators of a thread, whose first belongs to query `row` and key `key`: one
// that lies d more keys than queries behind it is seen if sees(d). Two registers, and d is known to
// the compiler.
template <bool kLeft>
struct SeenDiagonals {
  int low;
  int high;
  __device__ SeenDiagonals(const AttentionArgs& a, int row, int key, int offset)
      : low(row + offset - key - a.left), high(row + offset - key + a.right) {}
  __device__ bool sees(int d) const { return d <= high && (!kLeft || d >= low); }
};

// How a kernel cuts its work: kWarps warps a block, kTiles · 16 rows a warp, kColumns rows of the
// other side at a time; whether left operands stay in registers (kHeld) or are read from shared
// memory for each product; blocks a multiprocessor, which bounds the registers.
template <int Warps, int Tiles, int Columns, bool Held, int Blocks>
struct Cut {
  static constexpr int kWarps = Warps;
  static constexpr int kThreads = 32 * Warps;
  static constexpr int kTiles = Tiles;
  static constexpr int kRows = 16 * Tiles * Warps;
  static constexpr int kColumns = Columns;
  static constexpr bool kHeld = Held;
  static constexpr int kBlocks = Blocks;
};

// A warp's kTiles · 16 rows from `row` of a tile, as left operand of products over D.
template <int D, int kTiles, bool kHeld>
class LeftRows {
 public:
  // The tile must be there when kHeld.
  __device__ LeftRows(uint32_t tile, int row) : tile_(tile), row_(row) {
    if constexpr (kHeld) {
#pragma unroll
      for (int k = 0; k < D / 16; ++k) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) load_left<D>(held_[k][t], tile, row + 16 * t, k);
      }
    }
  }
  __device__ void get(uint32_t (&a)[4], int t, int k) const {
    if constexpr (kHeld) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = held_[k][t][i];
    } else {
      load_left<D>(a, tile_, row_ + 16 * t, k);
    }
  }

 private:
  uint32_t tile_;
  int row_;
  uint32_t held_[kHeld ? D / 16 : 1][kTiles][4];
};

// c = left · rows of `right`, transposed: [16 · kTiles, 8 · kColumns].
template <typename T, int D, int kTiles, int kColumns, bool kHeld>
__device__ void multiply_rows(float (&c)[kTiles][kColumns][4],
                              const LeftRows<D, kTiles, kHeld>& left, uint32_t right) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) c[t][n][i] = 0.0f;
    }
  }
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    uint32_t a[kTiles][4];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) left.get(a[t], t, k);
#pragma unroll
    for (int n = 0; n < kColumns; n += 2) {
      uint32_t b[4];
      load_right_rows<D>(b, right, 8 * n, k);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        mma<T>(c[t][n], a[t], b[0], b[1]);
        mma<T>(c[t][n + 1], a[t], b[2], b[3]);
      }
    }
  }
}

// acc[t] += p[t] (rounded to T) · right; p [16 · kTiles, 8 · kColumns], right [8 · kColumns, D].
template <typename T, int D, int kTiles, int kColumns>
__device__ void multiply_columns(float (&acc)[kTiles][D / 8][4],
                                 const float (&p)[kTiles][kColumns][4], uint32_t right) {
#pragma unroll
  for (int k = 0; k < kColumns / 2; ++k) {
    uint32_t a[kTiles][4];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) to_left<T>(a[t], p[t][2 * k], p[t][2 * k + 1]);
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
      uint32_t b[4];
      load_right_columns<D>(b, right, k, 8 * n);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        mma<T>(acc[t][n], a[t], b[0], b[1]);
        mma<T>(acc[t][n + 1], a[t], b[2], b[3]);
      }
    }
  }
}

// Writes acc · factor (a factor a row: rows l/4 and l/4 + 8 of each tile) as T into the warp's
// own rows of a tile, and from there, 16 bytes at a time, to rows [row, …) of a strided matrix.
template <int D, int kTiles, typename T>
__device__ void store_rows(const float (&acc)[kTiles][D / 8][4], const float (&factor)[kTiles][2],
                           unsigned char* tile, int row, T* to, int64_t stride, int rows,
                           int width) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row + 16 * t + 8 * half + lane / 4;
        *reinterpret_cast<uint32_t*>(tile + tile_offset<D>(r, n) + lane % 4 * 4) = pack_pair<T>(
            acc[t][n][2 * half] * factor[t][half], acc[t][n][2 * half + 1] * factor[t][half]);
      }
    }
  }
  __syncwarp();
  constexpr int kChunks = D / 8;
#pragma unroll
  for (int i = lane; i < 16 * kTiles * kChunks; i += 32) {
    const int r = row + i / kChunks;
    const int chunk = i % kChunks;
    if (r < rows && chunk * 8 < width) {
      *reinterpret_cast<uint4*>(to + r * stride + chunk * 8) =
          *reinterpret_cast<const uint4*>(tile + tile_offset<D>(r, chunk));
    }
  }
}

}  // namespace muster::cuda
