// Measures what this machine can do at best: multiply-add peaks and read bandwidth.
//
// Prints a JSON array of the names of what it can measure here, then answers each line of the input,
// "NAME THREADS REPETITIONS", with a JSON object {"name", "threads", "value", "unit"}. A figure is the best of the
// repetitions, since a peak is a limit: anything slower was disturbed. Operands are random, as
// multiplying zeros takes less power and lets the clock go higher than any real work. Built by
// roofline.py with -march=native; a part that the machine lacks is left out.

#include <immintrin.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
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

// Seconds of the fastest of the runs of work(thread), from the moment when all threads are ready.
double best_seconds(const Runs& runs, const std::function<void(int)>& work) {
  using Clock = std::chrono::steady_clock;
  double best = 1e30;
  for (int repetition = 0; repetition < runs.repetitions; ++repetition) {
    Clock::time_point start;
    std::barrier all_ready(runs.threads, [&]() noexcept { start = Clock::now(); });
    std::vector<std::thread> pool;
    for (int t = 1; t < runs.threads; ++t) {
      pool.emplace_back([&, t] {
        all_ready.arrive_and_wait();
        work(t);
      });
    }
    all_ready.arrive_and_wait();
    work(0);
    for (auto& thread : pool) thread.join();
    best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count());
  }
  return best;
}

// What is multiplied: fp32, or bf16 in pairs that read as fp32, of either sign and 0.5 to 2 in size; or bytes.
struct Operands {
  alignas(64) uint32_t numbers[1024];
  alignas(64) uint8_t bytes[4096];

  Operands() {
    uint32_t state = 1;
    const auto random = [&] { return (state = state * 1664525 + 1013904223) >> 16; };
    for (auto& number : numbers) number = ((random() << 16 | random()) & 0x80ff80ff) ^ 0x3f003f00;
    for (auto& byte : bytes) byte = static_cast<uint8_t>(random() >> 8);
  }
};
const Operands operands;

// The empty statements below tell the compiler that the sums are used and change, so that it
// neither drops the loop nor folds it.

#if defined(__AVX512F__)
using Float = __m512;
inline Float load_floats(const void* from) { return _mm512_loadu_ps(from); }
inline Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(__FMA__)
using Float = __m256;
inline Float load_floats(const void* from) {
  return _mm256_loadu_ps(static_cast<const float*>(from));
}
inline Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
#endif

#if defined(__FMA__)
void fp32_fma(int) {
  Float sums[kChains];
  for (auto& sum : sums) sum = load_floats(operands.numbers + 32);
  const Float x = load_floats(operands.numbers), y = load_floats(operands.numbers + 16);
  for (long i = 0; i < kIterations; ++i) {
#pragma GCC unroll 12
    for (auto& sum : sums) {
      sum = fma(x, y, sum);
      asm volatile("" : "+x"(sum));
    }
  }
}
#endif

#if defined(__AVX512VNNI__)
void int8_vnni(int) {
  __m512i sums[kChains];
  for (auto& sum : sums) sum = _mm512_setzero_si512();
  const __m512i x = _mm512_load_si512(operands.bytes), y = _mm512_load_si512(operands.bytes + 64);
  for (long i = 0; i < kIterations; ++i) {
#pragma GCC unroll 12
    for (auto& sum : sums) {
      // With the intrinsic, GCC 12 keeps the sums in memory.
      asm volatile("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
    }
  }
}
#endif

#if defined(__AVX512BF16__)
void bf16_dot(int) {
  __m512 sums[kChains];
  for (auto& sum : sums) sum = _mm512_setzero_ps();
  __m512bh x, y;
  std::memcpy(&x, operands.numbers, sizeof x);
  std::memcpy(&y, operands.numbers + 16, sizeof y);
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
  // GCC's intrinsic names only the first eight bytes as read: keep the other stores.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const auto* tiles =
      kInt8 ? operands.bytes : reinterpret_cast<const uint8_t*>(operands.numbers);
  _tile_loadd(4, tiles, 64);
  _tile_loadd(5, tiles + 1024, 64);
  _tile_loadd(6, tiles + 2048, 64);
  _tile_loadd(7, tiles + 3072, 64);
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

struct Peak {
  std::string name;
  const char* unit;
  std::function<double(const Runs&)> measure;  // in 1e9 a second
};

// `amount`: what one thread does in a run of `work`.
Peak peak_of(const char* name, const char* unit, double amount, void (*work)(int)) {
  return {name, unit, [=](const Runs& runs) {
            return amount * runs.threads / best_seconds(runs, work) / 1e9;
          }};
}

std::vector<Peak> arithmetic_peaks() {
  std::vector<Peak> peaks;
  const double chains = double(kIterations) * kChains;
  (void)chains;
#if defined(__FMA__)
  peaks.push_back(peak_of("fp32_fma", "GFLOP/s", chains * 2 * sizeof(Float) / 4, fp32_fma));
#endif
#if defined(__AVX512BF16__)
  peaks.push_back(peak_of("bf16_dot", "GFLOP/s", chains * 64, bf16_dot));
#endif
#if defined(__AVX512VNNI__)
  peaks.push_back(peak_of("int8_vnni", "GOP/s", chains * 128, int8_vnni));
#endif
#if defined(__AMX_INT8__)
  if (may_use_amx()) {
    const double tiles = double(kTileIterations) * 4;
    peaks.push_back(peak_of("bf16_amx", "GFLOP/s", tiles * 2 * 16 * 16 * 32, amx_tiles<false>));
    peaks.push_back(peak_of("int8_amx", "GOP/s", tiles * 2 * 16 * 16 * 64, amx_tiles<true>));
  }
#endif
  return peaks;
}

// Streams that a thread reads at once: the hardware fetches ahead in each, and not far enough in one.
constexpr int kStreams = 8;

// Reads the first `bytes` of `data`, split evenly among the threads, 64-bit lanes summed so that each
// load is used.
double read_bandwidth(const uint8_t* data, size_t bytes, const Runs& runs) {
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
  return double(share) * runs.threads / best_seconds(runs, read) / 1e9;
}

}  // namespace

int main() {
  constexpr size_t kSmall = size_t{100} << 20, kLarge = size_t{1} << 30;
  constexpr size_t kHugePage = size_t{2} << 20;  // where the system gives them, as the runtime's weights have them
  const std::unique_ptr<uint8_t, void (*)(void*)> buffer(
      static_cast<uint8_t*>(std::aligned_alloc(kHugePage, kLarge)), std::free);
  if (!buffer) {
    std::fprintf(stderr, "roofline: needs 1 GiB of memory\n");
    return 1;
  }
  madvise(buffer.get(), kLarge, MADV_HUGEPAGE);  // only advice: it may fail
  std::memset(buffer.get(), 1, kLarge);
  std::vector<Peak> peaks = arithmetic_peaks();
  for (const auto& [name, bytes] : {std::pair{"read_100_mib", kSmall}, {"read_1_gib", kLarge}}) {
    peaks.push_back({name, "GB/s", [&, bytes = bytes](const Runs& runs) {
                       return read_bandwidth(buffer.get(), bytes, runs);
                     }});
  }
  for (size_t i = 0; i < peaks.size(); ++i) {
    std::printf("%s\"%s\"%s", i == 0 ? "[" : ", ", peaks[i].name.c_str(),
                i + 1 == peaks.size() ? "]\n" : "");
  }
  std::fflush(stdout);
  std::string name;
  for (Runs runs{}; std::cin >> name >> runs.threads >> runs.repetitions;) {
    const auto peak = std::find_if(peaks.begin(), peaks.end(),
                                   [&](const Peak& one) { return one.name == name; });
    if (peak == peaks.end() || runs.threads < 1 || runs.repetitions < 1) {
      std::fprintf(stderr, "roofline: can't measure %s\n", name.c_str());
      return 1;
    }
    std::printf("{\"name\": \"%s\", \"threads\": %d, \"value\": %.1f, \"unit\": \"%s\"}\n", name.c_str(),
                runs.threads, peak->measure(runs), peak->unit);
    std::fflush(stdout);
  }
}
