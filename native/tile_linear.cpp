// Quantised weights packed for AMX tiles of bf16; the layout is described in tile_table.h.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "aligned_buffer.h"
#include "kernels.h"
#include "linear_implementation.h"
#include "pack_rows.h"
#include "thread_pool.h"
#include "tile_table.h"

namespace shoal {
namespace {

// Weights are cut to bf16, which makes them smaller by 2^-8 / (2 ln 2) on average over a mantissa that is
// distributed as those of products are; activations make up for it.
constexpr float kCutCorrection = 1.0f + 0x1p-8f * 0.7213475f;
constexpr int kCutExponent = 112;  // see linear_amx_unpack.h
constexpr int kLargestExponent = 14;
constexpr int kSmallestShift = -15;  // so that 2^(112 - shift) is a float
constexpr int kLargestShift = 100;

// Rows of one task: their activations stay in the second-level cache.
constexpr int64_t kActivationBytes = 1 << 20;
// Tasks of a thread: with few rows each must be long enough to be worth its hand-out.
constexpr int64_t kFewRows = 32;
constexpr int64_t kTasksOfFewRows = 3;
constexpr int64_t kTasksOfManyRows = 8;
// With so many rows each, threads share out the rows rather than the weights: what one writes it reads again
// in the ops that follow, and that many rows are worth unpacking the weights for.
constexpr int64_t kRowsOfAThread = 128;

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

bool has_nibbles(Format format) {
  return format == Format::kQ4_0 || format == Format::kQ4_1 || format == Format::kQ4_K;
}
bool has_min(Format format) {
  return format == Format::kQ4_1 || format == Format::kQ4_K || format == Format::kQ5_K;
}
int halves(Format format) { return format == Format::kQ6_K ? 2 : 1; }
int zero_point(Format format) {
  constexpr std::array<int, kNumQuantizedFormats> kZero = {0, 8, 128, 0, 0, 32};
  return kZero[static_cast<std::size_t>(format)];
}
// The largest quant, its zero point not yet taken off.
int largest_quant(Format format) {
  constexpr std::array<int, kNumQuantizedFormats> kLargest = {15, 15, 255, 15, 31, 63};
  return kLargest[static_cast<std::size_t>(format)];
}
// Scales and mins of a group of one output.
int num_halves(Format format) { return halves(format) + (has_min(format) ? 1 : 0); }
int64_t scale_bytes(Format format) { return packed_tile_bytes(0, num_halves(format)); }
// The quant that a packed min is the weight of.
float quant_of_min(Format format) {
  return has_nibbles(format) ? static_cast<float>(kQuantOfMin) : 0.0f;
}

// Where column k of an output lies in a tile: row k / 2, and the place of its 16 bits in that row.
int64_t lane(int64_t output, int k) { return 2 * output + k % 2; }

void put_half(uint8_t* to, int64_t index, float value) {
  const uint16_t half = float_to_half_bits(value);
  std::memcpy(to + 2 * index, &half, sizeof half);
}

float half_at(const uint8_t* from, int64_t index) {
  uint16_t half;
  std::memcpy(&half, from + 2 * index, sizeof half);
  return half_bits_to_float(half);
}

struct GroupScales {
  std::array<float, 2> scale;
  float min;
};

// No weight of the group is larger, whatever its quants.
float largest_weight(Format format, const GroupScales& group) {
  const int zero = zero_point(format);
  const auto farthest = static_cast<float>(std::max(zero, largest_quant(format) - zero));
  const float scale = std::max(std::fabs(group.scale[0]), std::fabs(group.scale[1]));
  return scale * farthest + std::fabs(group.min);
}

class TileLinear final : public Linear::Implementation {
 public:
  TileLinear(Format format, const WeightSource& source, const TileKernels& kernels, Arena& arena);

  int64_t outputs() const override { return matrix_.outputs; }
  int64_t inputs() const override { return matrix_.inputs; }
  bool is_gated() const override { return gated_; }
  int64_t prepared_bytes(int64_t rows) const override {
    return rows * x_stride() * static_cast<int64_t>(sizeof(uint16_t));
  }
  void prepare(const LinearInput& input, int64_t begin, int64_t end,
               uint8_t* prepared) const override;
  void multiply(ThreadPool& pool, const LinearInput& input, const uint8_t* prepared, float* y,
                int64_t y_stride) const override;
  void multiply_gated(ThreadPool& pool, const LinearInput& input, const uint8_t* prepared,
                      const Implementation& next, uint8_t* next_prepared) const override;
  void dequantize_row(int64_t row, float* out) const override;

 private:
  // An odd number of cache lines, so that the rows of a tile fall into different sets of the cache.
  int64_t x_stride() const { return round_up(matrix_.inputs, 64) + 32; }
  void choose_shift(float largest);
  void pack_quants(const DecodedGroup& group, uint8_t* tile, int64_t column) const;
  void pack_scales(const GroupScales& group, float unit, uint8_t* tile, int64_t column) const;
  uint8_t* tile(int64_t output, int64_t g) const {
    const int64_t half = matrix_.outputs / 2, of_half = gated_ ? output % half : output;
    const int64_t pair = gated_ ? of_half / kTile : output / (2 * kTile);
    const int64_t place = gated_ ? output / half : output / kTile % 2;
    return data_ + ((pair * matrix_.groups() + g) * 2 + place) * matrix_.tile_bytes;
  }
  // Calls gemm(args) for parts of the product on all threads.
  template <typename Gemm>
  void run(ThreadPool& pool, const LinearInput& input, const uint8_t* prepared, TileArgs args,
           Gemm&& gemm) const;

  TileMatrix matrix_{};
  bool gated_;
  uint8_t* data_;
  const TileKernels& kernels_;
  float activation_factor_;
};

TileLinear::TileLinear(Format format, const WeightSource& source, const TileKernels& kernels,
                       Arena& arena)
    : gated_(source.gated), kernels_(kernels) {
  matrix_.format = format;
  matrix_.outputs = source.outputs;
  matrix_.inputs = source.inputs;
  matrix_.pairs = round_up(source.outputs, 2 * kTile) / (2 * kTile);
  matrix_.tile_bytes = packed_tile_bytes(has_nibbles(format) ? 4 : 8, num_halves(format));
  data_ = arena.allocate(matrix_.pairs * matrix_.groups() * 2 * matrix_.tile_bytes);
  matrix_.data = data_;
  // The scales wait for the shift, which the largest of them decides.
  const int64_t stride = row_bytes(format, source.inputs), groups = matrix_.groups();
  std::vector<GroupScales> scales(static_cast<size_t>(source.outputs * groups));
  pack_rows(source.outputs, kTile, [&](int64_t begin, int64_t end) {
    for (int64_t output = begin; output < end; ++output) {
      for (int64_t g = 0; g < groups; ++g) {
        const DecodedGroup group = decode_group(format, source.data + output * stride, g);
        pack_quants(group, tile(output, g), output % kTile);
        scales[static_cast<size_t>(output * groups + g)] = {{group.scale[0], group.scale[1]},
                                                            group.min};
      }
    }
  });
  float largest = 0.0f;
  for (const GroupScales& group : scales) largest = std::max(largest, largest_weight(format, group));
  choose_shift(largest);
  const float unit = std::ldexp(1.0f, matrix_.shift);
  pack_rows(source.outputs, kTile, [&](int64_t begin, int64_t end) {
    for (int64_t output = begin; output < end; ++output) {
      for (int64_t g = 0; g < groups; ++g) {
        pack_scales(scales[static_cast<size_t>(output * groups + g)], unit, tile(output, g),
                    output % kTile);
      }
    }
  });
}

void TileLinear::choose_shift(float largest) {
  const bool usable = largest > 0.0f && std::isfinite(largest);
  matrix_.shift =
      usable ? std::clamp(kLargestExponent - std::ilogb(largest), kSmallestShift, kLargestShift)
             : 0;
  activation_factor_ = std::ldexp(kCutCorrection, kCutExponent - matrix_.shift);
}

void TileLinear::pack_quants(const DecodedGroup& group, uint8_t* tile, int64_t column) const {
  uint8_t* const quants = tile + scale_bytes(matrix_.format);
  if (has_nibbles(matrix_.format)) {
    for (int k = 0; k < kGroup; k += 8) {  // four rows of the tile
      const uint8_t* q = group.q + k;
      for (const int odd : {0, 1}) {
        uint8_t* place = quants + k / 8 * 64 + 2 * lane(column, odd);
        place[0] = static_cast<uint8_t>(q[odd] | q[odd + 2] << 4);
        place[1] = static_cast<uint8_t>(q[odd + 4] | q[odd + 6] << 4);
      }
    }
    return;
  }
  const int zero = zero_point(matrix_.format);
  for (int k = 0; k < kGroup; ++k) {
    quants[k / 2 * 32 + lane(column, k)] = static_cast<uint8_t>(group.q[k] - zero);
  }
}

void TileLinear::pack_scales(const GroupScales& group, float unit, uint8_t* tile,
                             int64_t column) const {
  for (int half = 0; half < halves(matrix_.format); ++half) {
    put_half(tile, half * kTile + column, group.scale[half] * unit);
  }
  if (has_min(matrix_.format)) {
    const float min = group.min + quant_of_min(matrix_.format) * group.scale[0];
    put_half(tile, kTile + column, min * unit);
  }
}

void TileLinear::prepare(const LinearInput& input, int64_t begin, int64_t end,
                         uint8_t* prepared) const {
  auto* out = reinterpret_cast<uint16_t*>(prepared);
  for (int64_t row = begin; row < end; ++row) {
    kernels_.round_row(input.x + row * input.stride, matrix_.inputs, activation_factor_,
                       out + row * x_stride());
  }
}

void TileLinear::multiply(ThreadPool& pool, const LinearInput& input, const uint8_t* prepared,
                          float* y, int64_t y_stride) const {
  TileArgs args{};
  args.y = y;
  args.y_stride = y_stride;
  run(pool, input, prepared, args, kernels_.gemm[static_cast<int>(matrix_.format)]);
}

void TileLinear::multiply_gated(ThreadPool& pool, const LinearInput& input,
                                const uint8_t* prepared, const Implementation& next,
                                uint8_t* next_prepared) const {
  const auto& to = dynamic_cast<const TileLinear&>(next);
  const GatedOutput out{reinterpret_cast<uint16_t*>(next_prepared), to.x_stride(),
                        to.activation_factor_};
  const auto gemm = kernels_.gated_gemm[static_cast<int>(matrix_.format)];
  run(pool, input, prepared, {}, [&](const TileArgs& args) { gemm(args, out); });
}

template <typename Gemm>
void TileLinear::run(ThreadPool& pool, const LinearInput& input, const uint8_t* prepared,
                     TileArgs args, Gemm&& gemm) const {
  args.w = &matrix_;
  args.x = reinterpret_cast<const uint16_t*>(prepared);
  args.x_stride = x_stride();
  const int64_t most_rows =
      std::max<int64_t>(32, kActivationBytes / (2 * matrix_.inputs) / 32 * 32);
  const int64_t least_tasks = (input.rows + most_rows - 1) / most_rows;
  const int64_t row_tasks = input.rows >= kRowsOfAThread * pool.size()
                                ? round_up(least_tasks, pool.size())
                                : least_tasks;
  const int64_t rows_per_task = round_up((input.rows + row_tasks - 1) / row_tasks, 32);
  const int64_t tasks_each = input.rows <= kFewRows ? kTasksOfFewRows : kTasksOfManyRows;
  const int64_t wanted = pool.size() == 1 ? 1 : pool.size() * tasks_each;
  const int64_t pairs_per_task = std::max<int64_t>(1, (matrix_.pairs * row_tasks + wanted - 1) / wanted);
  const int64_t column_tasks = (matrix_.pairs + pairs_per_task - 1) / pairs_per_task;
  pool.parallel_parts(row_tasks * column_tasks, [&](int64_t task, int) {
    static thread_local AlignedBuffer<uint8_t> scratch;
    TileArgs mine = args;
    mine.scratch = scratch.reserve(tile_scratch_bytes(rows_per_task));
    mine.row_begin = task / column_tasks * rows_per_task;
    mine.row_end = std::min(input.rows, mine.row_begin + rows_per_task);
    mine.pair_begin = task % column_tasks * pairs_per_task;
    mine.pair_end = std::min(matrix_.pairs, mine.pair_begin + pairs_per_task);
    if (mine.row_begin < mine.row_end) gemm(mine);
  });
}

void TileLinear::dequantize_row(int64_t row, float* out) const {
  const Format format = matrix_.format;
  const int zero = zero_point(format);
  const float unit = std::ldexp(1.0f, -matrix_.shift);
  for (int64_t k = 0; k < matrix_.inputs; ++k) {
    const uint8_t* scales = tile(row, k / kGroup);
    const uint8_t* quants = scales + scale_bytes(format);
    const int column = static_cast<int>(k % kGroup), tile_row = column / 2;
    int q;
    if (has_nibbles(format)) {
      const uint8_t both = quants[tile_row / 4 * 64 + 2 * lane(row % kTile, column) + tile_row % 4 / 2];
      q = (both >> (tile_row % 2 * 4) & 0x0f) - zero;
    } else {
      q = static_cast<int8_t>(quants[tile_row * 32 + lane(row % kTile, column)]);
    }
    const int half = halves(format) == 2 ? column / 16 : 0;
    const float scale = half_at(scales, half * kTile + row % kTile) * unit;
    if (has_min(format)) {
      const float min = half_at(scales, kTile + row % kTile) * unit;
      out[k] = scale * (static_cast<float>(q) - quant_of_min(format)) + min;
    } else {
      out[k] = scale * static_cast<float>(q);
    }
  }
}

}  // namespace

std::unique_ptr<Linear::Implementation> make_tile_linear(Format format,
                                                         const WeightSource& source, Arena& arena) {
  return std::make_unique<TileLinear>(format, source, *kernels_for(Isa::kAmx).tiles, arena);
}

}  // namespace shoal
