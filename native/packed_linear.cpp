// Weights packed for vectors: integer products of quantised formats, fp32 products of dense ones.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "aligned_buffer.h"
#include "kernels.h"
#include "linear_implementation.h"
#include "linear_table.h"
#include "pack_rows.h"
#include "thread_pool.h"

namespace shoal {

namespace {

constexpr int64_t kAlignment = 64;
// Rows of one task: their activations of 8 bits (up to 4,096 columns) stay in the second-level cache.
constexpr int64_t kRowsPerTask = 128;

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

bool has_half_scales(Format format) {
  return format == Format::kQ4_0 || format == Format::kQ4_1 || format == Format::kQ8_0;
}
bool has_min(Format format) {
  return format == Format::kQ4_1 || format == Format::kQ4_K || format == Format::kQ5_K;
}
bool has_nibbles(Format format) {
  return format == Format::kQ4_0 || format == Format::kQ4_1 || format == Format::kQ4_K;
}
int halves(Format format) { return format == Format::kQ6_K ? 2 : 1; }
// The quant that stands for zero, or for the middle of the others where there is a min.
int zero_point(Format format) {
  constexpr int kZero[kNumQuantizedFormats] = {8, 8, 128, 8, 16, 32};
  return kZero[static_cast<int>(format)];
}

void store_scale(bool half, uint8_t* base, int64_t index, float value) {
  if (half) {
    reinterpret_cast<uint16_t*>(base)[index] = float_to_half_bits(value);
  } else {
    reinterpret_cast<float*>(base)[index] = value;
  }
}

float load_scale(bool half, const uint8_t* base, int64_t index) {
  return half ? half_bits_to_float(reinterpret_cast<const uint16_t*>(base)[index])
              : reinterpret_cast<const float*>(base)[index];
}

void pack_group(const DecodedGroup& group, const PackedMatrix& m, uint8_t* tile, int64_t g,
                int64_t column) {
  for (int k = 0; k < 16; ++k) {
    const int64_t byte = k / 4 * 64 + column * 4 + k % 4;
    if (has_nibbles(m.format)) {
      tile[g * 256 + byte] = static_cast<uint8_t>(group.q[k] | group.q[k + 16] << 4);
    } else {
      tile[g * 512 + byte] = group.q[k];
      tile[g * 512 + 256 + byte] = group.q[k + 16];
    }
  }
  const bool half = has_half_scales(m.format);
  for (int h = 0; h < halves(m.format); ++h) {
    store_scale(half, tile + m.scale_offset, (g * halves(m.format) + h) * kTile + column,
                group.scale[h]);
  }
}

float min_about_zero(Format format, const DecodedGroup& group) {
  return group.min + static_cast<float>(zero_point(format)) * group.scale[0];
}

// Where a tile has the min of a group, an int16, and their unit.
int64_t min_place(const PackedMatrix& m, int64_t g, int64_t column) {
  return m.min_offset + (g / 2 * 2 * kTile + 2 * column + g % 2) * static_cast<int64_t>(sizeof(int16_t));
}
int64_t min_unit_place(const PackedMatrix& m, int64_t column) {
  return m.min_unit_offset + column * static_cast<int64_t>(sizeof(float));
}

// The mins of all groups of one output.
void pack_mins(const std::vector<float>& mins, const PackedMatrix& m, uint8_t* tile, int64_t column) {
  float largest = 0.0f;
  for (const float min : mins) largest = std::max(largest, std::fabs(min));
  const float unit = largest / kLargestMin;
  std::memcpy(tile + min_unit_place(m, column), &unit, sizeof unit);
  for (int64_t g = 0; g < m.groups(); ++g) {
    const auto min = static_cast<int16_t>(unit > 0.0f ? std::lrint(mins[g] / unit) : 0);
    std::memcpy(tile + min_place(m, g, column), &min, sizeof min);
  }
}

PackedMatrix layout(Format format, int64_t outputs, int64_t inputs) {
  PackedMatrix m{};
  m.format = format;
  m.outputs = outputs;
  m.inputs = inputs;
  m.tiles = round_up(outputs, 2 * kTile) / kTile;
  if (is_quantized(format)) {
    const int64_t scale_bytes = m.groups() * kTile * (has_half_scales(format) ? 2 : 4);
    m.scale_offset = inputs * kTile / (has_nibbles(format) ? 2 : 1);
    m.min_offset = m.scale_offset + scale_bytes * halves(format);
    m.min_unit_offset = m.min_offset + (m.groups() + 1) / 2 * 2 * kTile * 2;
    m.tile_bytes = round_up(has_min(format) ? m.min_unit_offset + kTile * 4 : m.min_offset, kAlignment);
  } else {
    m.tile_bytes = row_bytes(format, inputs) * kTile;
  }
  return m;
}

void pack_dense_row(const uint8_t* row, const PackedMatrix& m, uint8_t* tile, int64_t column) {
  const int64_t size = row_bytes(m.format, 1);
  for (int64_t k = 0; k < m.inputs; ++k) {
    std::memcpy(tile + (k * kTile + column) * size, row + k * size, static_cast<size_t>(size));
  }
}

class PackedLinear final : public Linear::Implementation {
 public:
  PackedLinear(Format format, const WeightSource& source, const LinearKernels& kernels,
               Arena& arena);

  int64_t outputs() const override { return matrix_.outputs; }
  int64_t inputs() const override { return matrix_.inputs; }
  int64_t packed_bytes() const override { return matrix_.tiles * matrix_.tile_bytes; }
  int64_t prepared_bytes(int64_t rows) const override;
  void prepare(const LinearInput& input, int64_t begin, int64_t end,
               uint8_t* prepared) const override;
  void multiply(ThreadPool& pool, const LinearInput& input, const uint8_t* prepared, float* y,
                int64_t y_stride) const override;
  void multiply_gated(ThreadPool&, const LinearInput&, const uint8_t*, const Implementation&,
                      uint8_t*) const override {
    throw std::logic_error("gates are multiplied on tiles only");
  }
  void dequantize_row(int64_t row, float* out) const override;

 private:
  QuantizedRows quantized(Precision precision, uint8_t* prepared) const {
    return {precision == Precision::kInt12, matrix_.groups(), prepared};
  }

  PackedMatrix matrix_;
  const LinearKernels& kernels_;
};

PackedLinear::PackedLinear(Format format, const WeightSource& source, const LinearKernels& kernels,
                           Arena& arena)
    : matrix_(layout(format, source.outputs, source.inputs)), kernels_(kernels) {
  uint8_t* data = arena.allocate(packed_bytes());
  matrix_.data = data;
  const int64_t stride = row_bytes(matrix_.format, matrix_.inputs);
  pack_rows(matrix_.outputs, kTile, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const uint8_t* row = source.data + n * stride;
      uint8_t* tile = data + n / kTile * matrix_.tile_bytes;
      if (!is_quantized(matrix_.format)) {
        pack_dense_row(row, matrix_, tile, n % kTile);
        continue;
      }
      std::vector<float> mins;
      for (int64_t g = 0; g < matrix_.groups(); ++g) {
        const DecodedGroup group = decode_group(matrix_.format, row, g);
        pack_group(group, matrix_, tile, g, n % kTile);
        mins.push_back(min_about_zero(matrix_.format, group));
      }
      if (has_min(matrix_.format)) pack_mins(mins, matrix_, tile, n % kTile);
    }
  });
}

int64_t PackedLinear::prepared_bytes(int64_t rows) const {
  if (!is_quantized(matrix_.format)) return 0;
  return rows * quantized(Precision::kInt12, nullptr).stride();
}

void PackedLinear::prepare(const LinearInput& input, int64_t begin, int64_t end,
                           uint8_t* prepared) const {
  if (!is_quantized(matrix_.format)) return;
  kernels_.quantize_rows(input.x, input.stride, begin, end,
                         {zero_point(matrix_.format), halves(matrix_.format) == 2},
                         quantized(input.precision, prepared));
}

void PackedLinear::multiply(ThreadPool& pool, const LinearInput& input, const uint8_t* prepared,
                            float* y, int64_t y_stride) const {
  const PackedMatrix& m = matrix_;
  GemmArgs args{};
  args.w = &m;
  args.y = y;
  args.y_stride = y_stride;
  args.dense = input.x;
  args.dense_stride = input.stride;
  if (is_quantized(m.format)) {
    args.x = quantized(input.precision, const_cast<uint8_t*>(prepared));
  }

  const int64_t pairs = m.tiles / 2;
  const int64_t row_tasks = (input.rows + kRowsPerTask - 1) / kRowsPerTask;
  // A few tasks for each thread even the load out; more would only cost hand-outs.
  const int64_t pairs_per_task = std::max<int64_t>(1, pairs * row_tasks / (pool.size() * 16));
  const int64_t column_tasks = (pairs + pairs_per_task - 1) / pairs_per_task;
  const auto gemm = kernels_.gemm[static_cast<int>(m.format)];
  pool.parallel_parts(row_tasks * column_tasks, [&](int64_t task, int) {
    static thread_local AlignedBuffer<uint8_t> scratch;
    GemmArgs mine = args;
    mine.scratch = scratch.reserve(2 * unpacked_tile_bytes(m.inputs));
    mine.row_begin = task / column_tasks * kRowsPerTask;
    mine.row_end = std::min(input.rows, mine.row_begin + kRowsPerTask);
    mine.tile_begin = task % column_tasks * pairs_per_task * 2;
    mine.tile_end = std::min(m.tiles, mine.tile_begin + pairs_per_task * 2);
    gemm(mine);
  });
}

void PackedLinear::dequantize_row(int64_t row, float* out) const {
  const PackedMatrix& m = matrix_;
  const uint8_t* tile = m.tile(row / kTile);
  const int64_t column = row % kTile;
  if (!is_quantized(m.format)) {
    for (int64_t k = 0; k < m.inputs; ++k) {
      const int64_t i = k * kTile + column;
      if (m.format == Format::kF32) {
        std::memcpy(out + k, tile + 4 * i, sizeof(float));
        continue;
      }
      uint16_t bits;
      std::memcpy(&bits, tile + 2 * i, sizeof bits);
      const uint32_t wide = static_cast<uint32_t>(bits) << 16;
      if (m.format == Format::kF16) {
        out[k] = half_bits_to_float(bits);
      } else {
        std::memcpy(out + k, &wide, sizeof wide);
      }
    }
    return;
  }
  const int zero = zero_point(m.format);
  const bool half = has_half_scales(m.format);
  for (int64_t k = 0; k < m.inputs; ++k) {
    const int64_t g = k / kGroup, i = k % kGroup;
    const int64_t byte = i % 16 / 4 * 64 + column * 4 + i % 4;
    int q;
    if (has_nibbles(m.format)) {
      const uint8_t both = tile[g * 256 + byte];
      q = i < 16 ? both & 0x0f : both >> 4;
    } else {
      q = tile[g * 512 + (i < 16 ? 0 : 256) + byte];
    }
    const int64_t sub = halves(m.format) == 2 ? g * 2 + i / 16 : g;
    const float scale = load_scale(half, tile + m.scale_offset, sub * kTile + column);
    out[k] = scale * static_cast<float>(q - zero);
    if (has_min(m.format)) {
      int16_t min;
      float unit;
      std::memcpy(&min, tile + min_place(m, g, column), sizeof min);
      std::memcpy(&unit, tile + min_unit_place(m, column), sizeof unit);
      out[k] += static_cast<float>(min) * unit;
    }
  }
}

}  // namespace

std::unique_ptr<Linear::Implementation> make_packed_linear(Format format,
                                                           const WeightSource& source, Isa isa,
                                                           Arena& arena) {
  return std::make_unique<PackedLinear>(format, source, *kernels_for(isa).linear, arena);
}

}  // namespace shoal
