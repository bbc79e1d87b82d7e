// Weights packed for vectors: integer products of quantised formats, fp32 products of dense ones.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
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

const QuantizedFormat& traits(Format format) { return kQuantizedFormats[static_cast<int>(format)]; }

// The halvings that keep the sum of all terms of an output in int32. A fine part adds less than a 64th to each,
// as its quants are 8 at most and it has four halvings more, and both are rounded by less than one.
int32_t headroom_of(const PackedMatrix& m) {
  constexpr int64_t kLargest = kLargestTerm + kLargestTerm / 64;
  const int64_t terms = m.groups() * traits(m.format).halves;
  int32_t headroom = 0;
  while (terms * ((kLargest >> headroom) + 3) > std::numeric_limits<int32_t>::max()) ++headroom;
  return headroom;
}

void pack_quants(const DecodedGroup& group, const PackedMatrix& m, uint8_t* tile, int64_t g,
                 int64_t column) {
  for (int k = 0; k < 16; ++k) {
    const int64_t byte = k / 4 * 64 + column * 4 + k % 4;
    if (traits(m.format).bits == 4) {
      tile[g * 256 + byte] = static_cast<uint8_t>(group.q[k] | group.q[k + 16] << 4);
    } else {
      tile[g * 512 + byte] = group.q[k];
      tile[g * 512 + 256 + byte] = group.q[k + 16];
    }
  }
}

// Where a tile has the scale of a half group, with the min behind it, and their unit.
int64_t scale_place(const PackedMatrix& m, int64_t g, int half, int64_t column) {
  const QuantizedFormat& format = traits(m.format);
  const int64_t index = (g * format.halves + half) * kTile + column;
  return m.scale_offset + index * (format.has_min ? 4 : 2);
}
int64_t unit_place(const PackedMatrix& m, int64_t column) { return m.unit_offset + column * 4; }

// The min of quants about their middle, as it is kept.
float packed_min(Format format, const DecodedGroup& group) {
  if (!traits(format).has_min) return 0.0f;
  const float min = group.min + static_cast<float>(traits(format).zero) * group.scale[0];
  return min / static_cast<float>(kMinUnits);
}

// The scales and mins of all groups of one output.
void pack_scales(const std::vector<DecodedGroup>& groups, const PackedMatrix& m, uint8_t* tile,
                 int64_t column) {
  float largest = 0.0f;
  for (const DecodedGroup& group : groups) {
    for (const float x : {group.scale[0], group.scale[1], packed_min(m.format, group)}) {
      largest = std::max(largest, std::fabs(x));
    }
  }
  const float unit = largest / static_cast<float>(kLargestScale);
  const float of_sums = std::ldexp(unit, m.headroom + traits(m.format).fit);
  std::memcpy(tile + unit_place(m, column), &of_sums, sizeof of_sums);
  const auto put = [&](float x, int64_t place) {
    const auto units = static_cast<int16_t>(unit > 0.0f ? std::lrint(x / unit) : 0);
    std::memcpy(tile + place, &units, sizeof units);
  };
  for (int64_t g = 0; g < m.groups(); ++g) {
    for (int half = 0; half < traits(m.format).halves; ++half) {
      put(groups[g].scale[half], scale_place(m, g, half, column));
    }
    if (traits(m.format).has_min) {
      put(packed_min(m.format, groups[g]), scale_place(m, g, 0, column) + 2);
    }
  }
}

PackedMatrix layout(Format format, const WeightSource& source) {
  PackedMatrix m{};
  m.format = format;
  m.outputs = source.outputs;
  m.inputs = source.inputs;
  m.gated = source.gated;
  m.tiles = round_up(m.outputs, 2 * kTile) / kTile;
  if (is_quantized(format)) {
    m.scale_offset = m.inputs * kTile * traits(format).bits / 8;
    m.unit_offset = scale_place(m, m.groups(), 0, 0);
    m.tile_bytes = round_up(unit_place(m, kTile), kAlignment);
    m.headroom = headroom_of(m);
  } else {
    m.tile_bytes = row_bytes(format, m.inputs) * kTile;
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
  bool is_gated() const override { return matrix_.gated; }
  int64_t prepared_bytes(int64_t rows) const override;
  void prepare(const LinearInput& input, int64_t begin, int64_t end,
               uint8_t* prepared) const override;
  void multiply(ThreadPool& pool, const LinearInput& input, const uint8_t* prepared, float* y,
                int64_t y_stride) const override;
  void multiply_gated(ThreadPool& pool, const LinearInput& input, const uint8_t* prepared,
                      const Implementation& next, uint8_t* next_prepared) const override;
  void dequantize_row(int64_t row, float* out) const override;

 private:
  int64_t tile_of(int64_t output) const {
    if (!matrix_.gated) return output / kTile;
    const int64_t half = matrix_.outputs / 2;
    return output % half / kTile * 2 + output / half;
  }
  QuantizedRows quantized(int64_t first_wide, uint8_t* prepared) const {
    return {first_wide < matrix_.outputs, matrix_.groups(), matrix_.headroom, prepared};
  }

  PackedMatrix matrix_;
  const LinearKernels& kernels_;
};

PackedLinear::PackedLinear(Format format, const WeightSource& source, const LinearKernels& kernels,
                           Arena& arena)
    : matrix_(layout(format, source)), kernels_(kernels) {
  uint8_t* data = arena.allocate(matrix_.tiles * matrix_.tile_bytes);
  matrix_.data = data;
  const int64_t stride = row_bytes(matrix_.format, matrix_.inputs);
  pack_rows(matrix_.outputs, kTile, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const uint8_t* row = source.data + n * stride;
      uint8_t* tile = data + tile_of(n) * matrix_.tile_bytes;
      if (!is_quantized(matrix_.format)) {
        pack_dense_row(row, matrix_, tile, n % kTile);
        continue;
      }
      std::vector<DecodedGroup> groups;
      for (int64_t g = 0; g < matrix_.groups(); ++g) {
        groups.push_back(decode_group(matrix_.format, row, g));
        pack_quants(groups.back(), matrix_, tile, g, n % kTile);
      }
      pack_scales(groups, matrix_, tile, n % kTile);
    }
  });
}

int64_t PackedLinear::prepared_bytes(int64_t rows) const {
  if (!is_quantized(matrix_.format)) return 0;
  return rows * quantized(kAllWide, nullptr).stride();
}

void PackedLinear::prepare(const LinearInput& input, int64_t begin, int64_t end,
                           uint8_t* prepared) const {
  if (!is_quantized(matrix_.format)) return;
  kernels_.quantize_rows(input.x, input.stride, begin, end, traits(matrix_.format),
                         quantized(input.first_wide, prepared));
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
    args.first_wide = input.first_wide;
    args.x = quantized(input.first_wide, const_cast<uint8_t*>(prepared));
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

void PackedLinear::multiply_gated(ThreadPool& pool, const LinearInput& input, const uint8_t* prepared,
                                  const Implementation& next, uint8_t* next_prepared) const {
  static thread_local AlignedBuffer<float> activated;  // of the caller, for all threads
  const int64_t stride = row_stride(matrix_.outputs / 2);
  const LinearInput of_next{activated.reserve(input.rows * stride), stride, input.rows, input.first_wide};
  multiply(pool, input, prepared, activated.data(), stride);
  const int64_t tasks = std::min<int64_t>(input.rows, 4 * pool.size());
  pool.parallel_parts(tasks, [&](int64_t task, int) {
    next.prepare(of_next, input.rows * task / tasks, input.rows * (task + 1) / tasks, next_prepared);
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
  const QuantizedFormat& format = traits(m.format);
  float unit;
  std::memcpy(&unit, tile + unit_place(m, column), sizeof unit);
  unit = std::ldexp(unit, -m.headroom - format.fit);
  for (int64_t k = 0; k < m.inputs; ++k) {
    const int64_t g = k / kGroup, i = k % kGroup;
    const int64_t byte = i % 16 / 4 * 64 + column * 4 + i % 4;
    int q;
    if (format.bits == 4) {
      const uint8_t both = tile[g * 256 + byte];
      q = i < 16 ? both & 0x0f : both >> 4;
    } else {
      q = tile[g * 512 + (i < 16 ? 0 : 256) + byte];
    }
    int16_t scale, min = 0;
    const int64_t place = scale_place(m, g, format.halves == 2 ? static_cast<int>(i / 16) : 0, column);
    std::memcpy(&scale, tile + place, sizeof scale);
    if (format.has_min) std::memcpy(&min, tile + place + 2, sizeof min);
    out[k] = unit * static_cast<float>(scale * (q - format.zero) + kMinUnits * min);
  }
}

}  // namespace

std::unique_ptr<Linear::Implementation> make_packed_linear(Format format,
                                                           const WeightSource& source, Isa isa,
                                                           Arena& arena) {
  return std::make_unique<PackedLinear>(format, source, *kernels_for(isa).linear, arena);
}

}  // namespace shoal
