// Building blocks of the Hopper attention kernels (sm_90a): mbarriers, tile copies by the TMA
// engine, products of a warpgroup (wgmma) and what their registers hold. The instructions are
// described in NVIDIA's PTX ISA manual, chapters "Parallel synchronization", "Data movement" and
// "Asynchronous warpgroup level matrix instructions".
//
// A tile is [rows, D] bf16, cut into panels of 64 columns: a row of a panel is 128 bytes, and its
// 16-byte chunk c lies at chunk c ^ (row % 8), the 128-byte swizzle that TMA writes and wgmma
// reads. Panels begin at multiples of 1024 bytes.
//
// Accumulator d[N / 2] of a 64×N product, in lane l of warp w of the warpgroup: d[4 i], d[4 i + 1]
// are row 16 w + l / 4, columns 8 i + 2 (l % 4) and the next; d[4 i + 2], d[4 i + 3] the same
// columns of row 16 w + l / 4 + 8. A left operand in registers, 64×16, is two such column blocks,
// rounded to bf16.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/attention/attention_cuda.h"
#include "kernels/cuda/copy_async.cuh"
#include "kernels/cuda/vec.cuh"

// True where a kernel's body is compiled: not in the passes for other architectures, where kernels
// of this header are empty.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MUSTER_HOPPER_CODE 1
#else
#define MUSTER_HOPPER_CODE 0
#endif

namespace muster::cuda::hopper {

constexpr int kWarpgroup = 128;  // threads
constexpr int kPanel = 64;       // columns of bf16
constexpr int kPanelRowBytes = 128;
constexpr float kLog2e = 1.4426950408889634f;

// ---------------------------------------------------------------- host

// A map of a [tokens, heads, D] bf16 operand whose box is `rows` tokens of one head and one panel;
// coordinates (column, head, token). Tokens beyond the tensor read as zeros.
CUtensorMap head_map(const HeadView& view, int64_t tokens, int heads, int width, int rows);
// A map of contiguous float32 [outer, middle, inner], box {1, rows, 32} laid out like a panel;
// coordinates (inner, middle, outer).
CUtensorMap float_map(float* data, int64_t outer, int64_t middle, int64_t inner, int rows);

// ---------------------------------------------------------------- barriers

using Barrier = uint64_t;  // an mbarrier in shared memory

__device__ inline void init_barrier(Barrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}
// After init_barrier, before the block's __syncthreads.
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
// Arrives, and lets the phase end only once `bytes` have been copied besides.
__device__ inline void arrive_expecting(Barrier* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
// Waits for the end of the phase of that parity; phases are numbered from 0, and the phase before
// the first counts as ended (parity 1).
__device__ inline void wait(Barrier* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni ended;\n"
      "bra.uni again;\n"
      "ended:\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
// Named barriers (1 to 15; 0 is __syncthreads) among `threads` threads of the block.
__device__ inline void sync_named(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void arrive_named(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Makes this thread's ordinary stores to shared memory visible to wgmma and TMA, behind the next
// barrier.
__device__ inline void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---------------------------------------------------------------- copies

__device__ inline void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ inline void copy_box(uint32_t to, const CUtensorMap* map, Barrier* barrier, int x, int y,
                                int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// A [rows, D] tile of `head` from token `token` on; panels are `panel_bytes` apart.
template <int D>
__device__ void copy_tile(uint32_t to, uint32_t panel_bytes, const CUtensorMap* map,
                          Barrier* barrier, int head, int token) {
#pragma unroll
  for (int p = 0; p < D / kPanel; ++p) {
    copy_box(to + p * panel_bytes, map, barrier, p * kPanel, head, token);
  }
}
// `bytes` in a row; both sides and `bytes` are multiples of 16.
__device__ inline void copy_bytes(uint32_t to, const void* from, uint32_t bytes, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
// Adds a box of float32 in shared memory to global memory; elements beyond the tensor are dropped.
__device__ inline void add_box(const CUtensorMap* map, uint32_t from, int x, int y, int z) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(from), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ inline void commit_adds() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until at most kPending of this thread's groups still read shared memory.
template <int kPending>
__device__ void wait_adds_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Until this thread's groups are complete in global memory.
__device__ inline void wait_adds() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// ---------------------------------------------------------------- registers

template <int kRegisters>
__device__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Keeps the compiler from moving uses of registers across a product that is under way.
template <int N>
__device__ void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N>
__device__ void pin(uint32_t (&a)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(a[i][j])::"memory");
  }
}

__device__ inline uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
// Columns [16 k, 16 k + 16) of an accumulator as left operand k.
template <int N>
__device__ void to_left(uint32_t (&a)[N / 8][4], const float (&d)[N]) {
#pragma unroll
  for (int k = 0; k < N / 8; ++k) {
#pragma unroll
    for (int j = 0; j < 4; ++j) a[k][j] = pack_bf16(d[8 * k + 2 * j], d[8 * k + 2 * j + 1]);
  }
}

// 2^x, 2 units in the last place; 0 at −∞.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---------------------------------------------------------------- products

// Descriptor of an operand in shared memory whose rows are the product's own (rows of the left,
// columns of the right operand) and whose columns are summed over; 16 columns further is 32 bytes
// further.
__device__ inline uint64_t row_operand(uint32_t address) {
  constexpr uint64_t kFixed = (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (1 << 16);
  return kFixed | ((address & 0x3ffff) >> 4);
}
// The same where the tile's rows are summed over: panels of 64 of the product's own rows or
// columns lie `panel_bytes` apart; 16 rows further is 2048 bytes further.
__device__ inline uint64_t column_operand(uint32_t address, uint32_t panel_bytes) {
  constexpr uint64_t kFixed = (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32);
  return kFixed | (static_cast<uint64_t>(panel_bytes >> 4) << 16) | ((address & 0x3ffff) >> 4);
}

__device__ inline void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most kPending groups are under way; the given registers are readable from here on.
template <int kPending, typename... Registers>
__device__ void wait_products(Registers&... registers) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
  (pin(registers), ...);
}

#define MUSTER_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MUSTER_F16(d, i) \
  MUSTER_F4(d, i), MUSTER_F4(d, i + 4), MUSTER_F4(d, i + 8), MUSTER_F4(d, i + 12)
#define MUSTER_F32(d, i) MUSTER_F16(d, i), MUSTER_F16(d, i + 16)
#define MUSTER_D32                                                                      \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22," \
  "%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define MUSTER_D64                                                                       \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,"  \
  "%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43," \
  "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"

// d = a · b (accumulate: d += a · b) for 16 summed columns, 64×64 or 64×128. kColumns: both
// operands are column operands.
template <bool kColumns>
__device__ void multiply(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " MUSTER_D32
      ", %32, %33, p, 1, 1, %35, %35;\n}\n"
      : MUSTER_F32(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kColumns ? 1 : 0));
}
template <bool kColumns>
__device__ void multiply(float (&d)[64], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " MUSTER_D64
      ", %64, %65, p, 1, 1, %67, %67;\n}\n"
      : MUSTER_F32(d, 0), MUSTER_F32(d, 32)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kColumns ? 1 : 0));
}
// d += a · b, the left operand in registers, b a column operand.
__device__ inline void multiply(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " MUSTER_D32
      ", {%32,%33,%34,%35}, %36, p, 1, 1, 1;\n}\n"
      : MUSTER_F32(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ inline void multiply(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " MUSTER_D64
      ", {%64,%65,%66,%67}, %68, p, 1, 1, 1;\n}\n"
      : MUSTER_F32(d, 0), MUSTER_F32(d, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef MUSTER_D64
#undef MUSTER_D32
#undef MUSTER_F32
#undef MUSTER_F16
#undef MUSTER_F4

// d = left · rightᵀ over D columns: 64 rows of a tile (from its address `left`) with N rows of
// another.
template <int D, int N>
__device__ void multiply_rows(float (&d)[N / 2], uint32_t left, uint32_t left_panel, uint32_t right,
                              uint32_t right_panel) {
  pin(d);
  begin_products();
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    const uint32_t column = k % 4 * 32;
    multiply<false>(d, row_operand(left + k / 4 * left_panel + column),
                    row_operand(right + k / 4 * right_panel + column), k > 0);
  }
  commit_products();
}

// d += a · tile: a [64, K] in registers, tile [K, D].
template <int K, int N>
__device__ void multiply_columns(float (&d)[N], uint32_t (&a)[K / 16][4], uint32_t tile,
                                 uint32_t panel_bytes) {
  pin(d);
  pin(a);
  begin_products();
#pragma unroll
  for (int k = 0; k < K / 16; ++k) {
    multiply(d, a[k], column_operand(tile + k * 16 * kPanelRowBytes, panel_bytes));
  }
  commit_products();
}

// ---------------------------------------------------------------- registers to shared memory

// Column block k (16 columns) of a left operand into this warp's 16 rows (from `row`) of a tile.
template <int kBlocks>
__device__ void store_left(const uint32_t (&a)[kBlocks][4], uint32_t tile, uint32_t panel_bytes,
                           int row) {
  const int lane = threadIdx.x % 32;
  const int r = row + lane % 16;
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) {
    const int chunk = k % 4 * 2 + lane / 16;
    const uint32_t to = tile + k / 4 * panel_bytes + r * kPanelRowBytes + ((chunk ^ (r & 7)) << 4);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to),
                 "r"(a[k][0]), "r"(a[k][1]), "r"(a[k][2]), "r"(a[k][3])
                 : "memory");
  }
}

// This warp's 16 rows of a [64, D] result (an accumulator, times a factor for each of the two rows
// a lane holds), rounded to bf16, through its own rows of a tile in shared memory to a strided
// matrix; rows from `rows` on are left out. `row` is the warp's first, in the tile and from `to`.
template <int D>
__device__ void store_rows(const float (&d)[D / 2], float factor0, float factor1, uint32_t tile,
                           uint32_t panel_bytes, int row, bf16* to, int64_t stride, int rows) {
  uint32_t a[D / 16][4];
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float factor = j % 2 == 0 ? factor0 : factor1;
      a[k][j] = pack_bf16(d[8 * k + 2 * j] * factor, d[8 * k + 2 * j + 1] * factor);
    }
  }
  __syncwarp();
  store_left(a, tile, panel_bytes, row);
  __syncwarp();
  constexpr int kChunks = D / 8;
#pragma unroll
  for (int i = threadIdx.x % 32; i < 16 * kChunks; i += 32) {
    const int r = row + i / kChunks;
    const int chunk = i % kChunks;
    if (r < rows) {
      const uint32_t from =
          tile + chunk / 8 * panel_bytes + r * kPanelRowBytes + (((chunk % 8) ^ (r & 7)) << 4);
      uint4 x;
      asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                   : "r"(from)
                   : "memory");
      *reinterpret_cast<uint4*>(to + r * stride + chunk * 8) = x;
    }
  }
}

}  // namespace muster::cuda::hopper
