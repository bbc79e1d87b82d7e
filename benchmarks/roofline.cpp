// Measures what this machine can do at best: multiply-add peaks and read bandwidth.
//
// Called with a number of repetitions and numbers of threads; prints one JSON object a line: {"name",
// "threads", "value", "unit"}. Each figure is the best of the repetitions, since a peak is a limit:
// anything slower was disturbed. Built by roofline.py with -march=native; a part that the machine
// lacks is left out.

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr long kIterations = 100'000;
// Enough independent sums to hide a latency of four cycles at two operations a cycle, and few
// enough that they stay in registers.
constexpr int kChains = 12;

// How many threads work at once, and how often: short, and often, as on a shared machine few moments
// are undisturbed.
struct Runs {
  int threads;
  int repetitions;
};

// Seconds of the fastest of the runs of work(thread).
double best_seconds(const Runs& runs, const std::function<void(int)>& work) {
  double best = 1e30;
  for (int repetition = 0; repetition < runs.repetitions; ++repetition) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> pool;
    for (int t = 1; t < runs.threads; ++t) pool.emplace_back(work, t);
    work(0);
    for (auto& thread : pool) thread.join();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    best = std::min(best, elapsed.count());
  }
  return best;
}

void report(const std::string& name, int threads, double value, const char* unit) {
  std::printf("{\"name\": \"%s\", \"threads\": %d, \"value\": %.1f, \"unit\": \"%s\"}\n",
              name.c_str(), threads, value, unit);
  std::fflush(stdout);
}

// The empty statements below tell the compiler that the sums are used and change, so that it
// neither drops the loop nor folds it.

#if defined(__AVX512F__)
using Float = __m512;
inline Float set_float(float x) { return _mm512_set1_ps(x); }
inline Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(__FMA__)
using Float = __m256;
inline Float set_float(float x) { return _mm256_set1_ps(x); }
inline Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
#endif

#if defined(__FMA__)
void fp32_fma(int) {
  Float sums[kChains];
  for (auto& sum : sums) sum = set_float(0.0f);
  const Float x = set_float(1e-3f), y = set_float(2e-3f);
  for (long i = 0; i < kIterations; ++i) {
#pragma GCC unroll 12
    for (auto& sum : sums) {
      sum = fma(sum, x, y);
      asm volatile("" : "+x"(sum));
    }
  }
}
#endif

#if defined(__AVX512VNNI__)
void int8_vnni(int) {
  __m512i sums[kChains];
  for (auto& sum : sums) sum = _mm512_setzero_si512();
  const __m512i x = _mm512_set1_epi8(1), y = _mm512_set1_epi8(2);
  for (long i = 0; i < kIterations; ++i) {
#pragma GCC unroll 12
    for (auto& sum : sums) {
      sum = _mm512_dpbusd_epi32(sum, x, y);
      asm volatile("" : "+v"(sum));
    }
  }
}
#endif

#if defined(__AVX512BF16__)
void bf16_dot(int) {
  __m512 sums[kChains];
  for (auto& sum : sums) sum = _mm512_setzero_ps();
  const __m512i zero = _mm512_setzero_si512();
  __m512bh x, y;
  std::memcpy(&x, &zero, sizeof x);
  std::memcpy(&y, &zero, sizeof y);
  for (long i = 0; i < kIterations; ++i) {
#pragma GCC unroll 12
    for (auto& sum : sums) {
      sum = _mm512_dpbf16_ps(sum, x, y);
      asm volatile("" : "+v"(sum));
    }
  }
}
#endif

#if defined(__AMX_INT8__)
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// Linux grants the tile registers on request only.
bool may_use_amx() {
  constexpr int kArchReqXcompPerm = 0x1023, kXfeatureTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureTileData) == 0;
}

constexpr long kTileIterations = kIterations / 2;

// Four sums from two tiles on each side: the shape of a matrix product that reuses its tiles.
template <bool kInt8>
void amx_tiles(int) {
  TileConfig config;
  std::fill_n(config.bytes_per_row, 8, uint16_t{64});
  std::fill_n(config.rows, 8, uint8_t{16});
  alignas(64) static const int8_t zeros[1024] = {};
  // GCC's intrinsic names only the first eight bytes as read: keep the other stores.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, zeros, 64);
  _tile_loadd(5, zeros, 64);
  _tile_loadd(6, zeros, 64);
  _tile_loadd(7, zeros, 64);
  for (long i = 0; i < kTileIterations; ++i) {
    if constexpr (kInt8) {
      _tile_dpbusd(0, 4, 6);
      _tile_dpbusd(1, 4, 7);
      _tile_dpbusd(2, 5, 6);
      _tile_dpbusd(3, 5, 7);
    } else {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_release();
}
#endif

void report_arithmetic(const Runs& runs) {
  const int threads = runs.threads;
  const double chains = double(kIterations) * kChains * threads;
  (void)chains;
#if defined(__FMA__)
  report("fp32_fma", threads,
         chains * 2 * sizeof(Float) / 4 / best_seconds(runs, fp32_fma) / 1e9, "GFLOP/s");
#endif
#if defined(__AVX512BF16__)
  report("bf16_dot", threads, chains * 64 / best_seconds(runs, bf16_dot) / 1e9, "GFLOP/s");
#endif
#if defined(__AVX512VNNI__)
  report("int8_vnni", threads, chains * 128 / best_seconds(runs, int8_vnni) / 1e9, "GOP/s");
#endif
#if defined(__AMX_INT8__)
  if (!may_use_amx()) return;
  const double tiles = double(kTileIterations) * 4 * threads;
  report("bf16_amx", threads,
         tiles * 2 * 16 * 16 * 32 / best_seconds(runs, amx_tiles<false>) / 1e9, "GFLOP/s");
  report("int8_amx", threads,
         tiles * 2 * 16 * 16 * 64 / best_seconds(runs, amx_tiles<true>) / 1e9, "GOP/s");
#endif
}

// Streams that a thread reads at once: the hardware fetches ahead in each, and not far enough in one.
constexpr int kStreams = 8;

// Reads `bytes` split evenly among the threads, 64-bit lanes summed so that each load is used.
void report_bandwidth(const char* name, const uint8_t* data, size_t bytes, const Runs& runs) {
  using Lanes = uint64_t __attribute__((vector_size(64)));
  const size_t lines = bytes / runs.threads / kStreams / sizeof(Lanes);
  const size_t share = lines * kStreams * sizeof(Lanes);
  const auto read = [&](int thread) {
    const auto* lanes = reinterpret_cast<const Lanes*>(data + share * thread);
    Lanes sums[kStreams] = {};
    for (size_t i = 0; i < lines; ++i) {
      for (int stream = 0; stream < kStreams; ++stream) sums[stream] += lanes[stream * lines + i];
    }
    asm volatile("" : : "m"(sums));
  };
  report(name, runs.threads, double(share) * runs.threads / best_seconds(runs, read) / 1e9, "GB/s");
}

}  // namespace

int main(int argc, char** argv) {
  const int repetitions = argc > 1 ? std::atoi(argv[1]) : 0;
  constexpr size_t kSmall = size_t{100} << 20, kLarge = size_t{1} << 30;
  const std::unique_ptr<uint8_t, void (*)(void*)> buffer(
      static_cast<uint8_t*>(std::aligned_alloc(4096, kLarge)), std::free);
  if (repetitions < 1 || !buffer) {
    std::fprintf(stderr, "roofline: needs a number of repetitions and 1 GiB of memory\n");
    return 1;
  }
  std::memset(buffer.get(), 1, kLarge);
  for (int i = 2; i < argc; ++i) {
    const Runs runs{std::atoi(argv[i]), repetitions};
    report_arithmetic(runs);
    report_bandwidth("read_100_mib", buffer.get(), kSmall, runs);
    report_bandwidth("read_1_gib", buffer.get(), kLarge, runs);
  }
}
