#include "kernels/bench_timing.h"

#include <immintrin.h>
#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <vector>

#include "kernels/vector_math.h"

namespace muster {
namespace {

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Independent chains of 16 lanes, to hide an fma's latency: with their two constants they fill
// AVX2's sixteen registers, at two a chain. Returns something that depends on all of them.
constexpr int kChains = 7;
MUSTER_SIMD_CLONES float fma_chains(int64_t steps) {
  cpu::Vec x[kChains];
  for (int c = 0; c < kChains; ++c) x[c] = cpu::broadcast(static_cast<float>(c));
  const cpu::Vec factor = cpu::broadcast(0.999f);
  const cpu::Vec term = cpu::broadcast(0.001f);
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 7
    for (int c = 0; c < kChains; ++c) x[c] = x[c] * factor + term;
  }
  cpu::Vec sum = x[0];
  for (int c = 1; c < kChains; ++c) sum += x[c];
  return cpu::reduce_add(sum);
}

// Stores that leave the lines in the cache, and stores that go around it: which is the faster
// differs between machines and sizes.
void copy_cached(uint8_t* to, const uint8_t* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += sizeof(__m256i)) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(to + i),
                       _mm256_load_si256(reinterpret_cast<const __m256i*>(from + i)));
  }
}
void copy_streaming(uint8_t* to, const uint8_t* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += sizeof(__m256i)) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm256_load_si256(reinterpret_cast<const __m256i*>(from + i)));
  }
  _mm_sfence();
}

}  // namespace

CacheFlusher::CacheFlusher(int64_t bytes) {
  if (bytes == 0) {
    constexpr int64_t kAtLeast = 64 << 20;
    const int64_t last_level = std::max<int64_t>(0, sysconf(_SC_LEVEL3_CACHE_SIZE));
    bytes = std::max(kAtLeast, 2 * last_level);
  }
  buffer_ = Tensor::zeros({bytes}, DType::kUInt8);
}

void CacheFlusher::flush() {
  uint8_t* data = buffer_.data<uint8_t>();
  const int64_t n = buffer_.numel();
  // Volatile, and one write a cache line: every line is taken into the cache, which a large memset
  // would go around.
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < n; i += 64) {
    volatile uint8_t* line = data + i;
    *line = static_cast<uint8_t>(*line + 1);
  }
}

Timing time_runs(CacheFlusher& flusher, double seconds, const std::function<void()>& run) {
  run();
  run();
  std::vector<double> times;
  double total = 0.0;
  const double start = now_s();
  while (times.size() < 3 || (total < seconds && now_s() - start < 10 * seconds)) {
    flusher.flush();
    const double begin = now_s();
    run();
    times.push_back(now_s() - begin);
    total += times.back();
  }
  std::sort(times.begin(), times.end());
  return {.runs = static_cast<int64_t>(times.size()),
          .median_s = times[times.size() / 2],
          .fastest_s = times.front()};
}

double measure_copy_gb_per_s(CacheFlusher& flusher, double seconds) {
  constexpr int64_t kPart = 8 << 20;  // bytes a thread
  const int threads = omp_get_max_threads();
  const Tensor from = Tensor::zeros({threads * kPart}, DType::kUInt8);
  const Tensor to = Tensor::zeros({threads * kPart}, DType::kUInt8);
  double fastest = std::numeric_limits<double>::infinity();
  for (const auto copy : {copy_cached, copy_streaming}) {
    const Timing timing = time_runs(flusher, seconds / 2, [&] {
#pragma omp parallel for schedule(static)
      for (int t = 0; t < threads; ++t) {
        copy(to.data<uint8_t>() + t * kPart, from.data<uint8_t>() + t * kPart, kPart);
      }
    });
    fastest = std::min(fastest, timing.fastest_s);
  }
  return 2.0 * threads * kPart / fastest / 1e9;
}

double measure_fma_gflop_per_s(double seconds) {
  constexpr int64_t kSteps = 1 << 20;
  double best = 0.0;
  const double start = now_s();
  do {
    const int threads = omp_get_max_threads();
    std::vector<float> results(threads);
    const double begin = now_s();
#pragma omp parallel for schedule(static)
    for (int t = 0; t < threads; ++t) results[t] = fma_chains(kSteps);
    const double elapsed = now_s() - begin;
    // The results are used, so that the chains cannot be dropped: they converge to 1.
    for (const float result : results) MUSTER_CHECK(result > 0.0f);
    best = std::max(best, 2.0 * kSteps * kChains * cpu::kLanes * threads / elapsed / 1e9);
  } while (now_s() - start < seconds);
  return best;
}

}  // namespace muster
