#include "linear.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#include "kernels.h"
#include "linear_table.h"
#include "thread_pool.h"

namespace shoal {

namespace {

constexpr int64_t kAlignment = 64;
// Rows of one task: their quantised activations (up to 6,144 columns) stay in the second-level cache.
constexpr int64_t kRowsPerTask = 256;
constexpr int64_t kSerialQuantize = 8192;  // below so many values a barrier costs more than the work

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Memory that grows and keeps its alignment; contents are not kept.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  uint8_t* reserve(int64_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      const int64_t size = round_up(bytes, kAlignment);
      data_ = static_cast<uint8_t*>(std::aligned_alloc(kAlignment, static_cast<size_t>(size)));
      if (data_ == nullptr) throw std::bad_alloc();
      size_ = size;
    }
    return data_;
  }
  const uint8_t* data() const { return data_; }

 private:
  uint8_t* data_ = nullptr;
  int64_t size_ = 0;
};

bool has_nibbles(Format format) {
  return format == Format::kQ4_0 || format == Format::kQ4_1 || format == Format::kQ4_K;
}
int halves(Format format) { return format == Format::kQ6_K ? 2 : 1; }

// How the quants q of a format are packed: p = (q - zero) << shift. In the file w = scale * (q - file_zero)
// + min.
struct Quants {
  int file_zero;
  int zero;
  int shift;
  int lowest, highest;  // bounds of q - zero
};

Quants quants_of(Format format) {
  switch (format) {
    case Format::kQ4_0: return {8, 0, 0, 0, 15};
    case Format::kQ8_0: return {128, 128, 0, -128, 127};
    case Format::kQ5_K: return {0, 16, 3, -17, 15};  // 1 more than there are: factors fit 16 bits then
    case Format::kQ6_K: return {32, 32, 2, -32, 31};
    default: return {0, 0, 0, 0, 15};
  }
}

// The weights of a (half) group are scale * (q - zero) + min, with the zero of Quants.
struct GroupScale {
  float scale, min;

  GroupScale(const DecodedGroup& group, const Quants& quants, int half)
      : scale(group.scale[half]),
        min(group.min + scale * static_cast<float>(quants.zero - quants.file_zero)) {}
  float largest(const Quants& quants) const {
    return std::max(std::fabs(scale * static_cast<float>(quants.lowest) + min),
                    std::fabs(scale * static_cast<float>(quants.highest) + min));
  }
};

// |W| of the largest weight of an output and segment: with what rounds it stays within 16 bits.
constexpr float kWeightLevels = 256.0f * 127.0f;
constexpr int kRounding = 128;  // T - W
constexpr int kQuadOrder[] = {0, 2, 1, 3};

void pack_quants(const DecodedGroup& group, const PackedMatrix& m, uint8_t* packed,
                 int64_t column) {
  const Quants quants = quants_of(m.format);
  for (int k = 0; k < kGroup; ++k) {
    const int64_t byte = k % 16 / 4 * 64 + column * 4 + kQuadOrder[k % 4];
    if (has_nibbles(m.format)) {
      packed[byte] |= static_cast<uint8_t>(group.q[k] << (k < 16 ? 0 : 4));
    } else {
      packed[(k < 16 ? 0 : 256) + byte] =
          static_cast<uint8_t>((group.q[k] - quants.zero) << quants.shift);
    }
  }
}

int16_t* group_factors(const PackedMatrix& m, uint8_t* group) {
  return reinterpret_cast<int16_t*>(group + kGroup * kTile / (has_nibbles(m.format) ? 2 : 1));
}

// One output and segment of a row in the file.
void pack_segment(const uint8_t* row, const PackedMatrix& m, uint8_t* tile, int64_t segment,
                  int64_t column) {
  const Quants quants = quants_of(m.format);
  const int64_t begin = m.first_group(segment);
  const int64_t end = std::min(m.end_group(segment), m.inputs / kGroup);
  float largest = 0.0f;
  for (int64_t g = begin; g < end; ++g) {
    const DecodedGroup group = decode_group(m.format, row, g);
    for (int h = 0; h < halves(m.format); ++h) {
      largest = std::max(largest, GroupScale(group, quants, h).largest(quants));
    }
  }
  const float step = largest / kWeightLevels;  // of W
  auto* steps = reinterpret_cast<float*>(tile + m.groups * m.group_bytes);
  steps[segment * kTile + column] = 256.0f * step;
  const float per_step = step > 0.0f ? 1.0f / step : 0.0f;
  // multiply_high divides by 2^15, and bytes are shifted up by 8 for it.
  const float unit = has_nibbles(m.format) ? 1.0f : 128.0f / static_cast<float>(1 << quants.shift);
  for (int64_t g = begin; g < m.end_group(segment); ++g) {
    uint8_t* packed = tile + g * m.group_bytes;
    int16_t* factors = group_factors(m, packed);
    int16_t* offsets = factors + halves(m.format) * kTile;
    const bool is_padding = g >= end;
    const DecodedGroup group = is_padding ? DecodedGroup{} : decode_group(m.format, row, g);
    if (!is_padding) pack_quants(group, m, packed, column);
    for (int h = 0; h < halves(m.format); ++h) {
      const GroupScale scale(group, quants, h);
      factors[h * kTile + column] = static_cast<int16_t>(std::lrintf(scale.scale * per_step * unit));
      offsets[h * kTile + column] =
          static_cast<int16_t>(std::lrintf(scale.min * per_step) + kRounding);
    }
  }
}

PackedMatrix layout(Format format, int64_t outputs, int64_t inputs) {
  PackedMatrix m{};
  m.format = format;
  m.outputs = outputs;
  m.inputs = inputs;
  m.tiles = round_up(outputs, 2 * kTile) / kTile;
  if (is_quantized(format)) {
    m.groups = round_up(inputs / kGroup, 2);
    m.segments = (m.groups * kGroup + kLongestSegment - 1) / kLongestSegment;
    m.segment_groups = round_up((m.groups + m.segments - 1) / m.segments, 2);
    m.group_bytes = kGroup * kTile / (has_nibbles(format) ? 2 : 1) + halves(format) * kTile * 4;
    m.tile_bytes = m.groups * m.group_bytes +
                   m.segments * kTile * static_cast<int64_t>(sizeof(float));
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

}  // namespace

struct Linear::Impl {
  PackedMatrix matrix;
  Buffer packed;
  const LinearKernels* kernels;

  void pack(const WeightSource& source);
  QuantizedRows quantize(ThreadPool& pool, const float* x, int64_t x_stride, int64_t rows) const;
};

void Linear::Impl::pack(const WeightSource& source) {
  const int64_t bytes = matrix.tiles * matrix.tile_bytes;
  uint8_t* data = packed.reserve(bytes);
  std::memset(data, 0, static_cast<size_t>(bytes));
  matrix.data = data;
  const int64_t stride = row_bytes(matrix.format, matrix.inputs);
  for (int64_t n = 0; n < matrix.outputs; ++n) {
    const uint8_t* row = source.data + n * stride;
    uint8_t* tile = data + n / kTile * matrix.tile_bytes;
    if (!is_quantized(matrix.format)) {
      pack_dense_row(row, matrix, tile, n % kTile);
      continue;
    }
    for (int64_t segment = 0; segment < matrix.segments; ++segment) {
      pack_segment(row, matrix, tile, segment, n % kTile);
    }
  }
}

Linear::Linear(const WeightSource& source, Isa isa) : impl_(std::make_unique<Impl>()) {
  if (source.outputs <= 0) {
    throw std::invalid_argument("a weight needs at least one output, got " +
                                std::to_string(source.outputs));
  }
  const Format format = parse_format(source.type);
  row_bytes(format, source.inputs);  // checks the columns
  impl_->matrix = layout(format, source.outputs, source.inputs);
  impl_->kernels = kernels_for(isa).linear;
  impl_->pack(source);
}

Linear::~Linear() = default;
Linear::Linear(Linear&&) noexcept = default;

int64_t Linear::outputs() const { return impl_->matrix.outputs; }
int64_t Linear::inputs() const { return impl_->matrix.inputs; }
int64_t Linear::packed_bytes() const { return impl_->matrix.tiles * impl_->matrix.tile_bytes; }

QuantizedRows Linear::Impl::quantize(ThreadPool& pool, const float* x, int64_t x_stride,
                                     int64_t rows) const {
  const int64_t scale_bytes =
      round_up(rows * matrix.segments * static_cast<int64_t>(sizeof(float)), kAlignment);
  const int64_t row_bytes = matrix.groups * kGroup * 2;
  static thread_local Buffer buffer;
  uint8_t* p = buffer.reserve(scale_bytes + round_up(rows, kRowPadding) * row_bytes);
  const QuantizedRows out{reinterpret_cast<int8_t*>(p + scale_bytes), reinterpret_cast<float*>(p)};
  if (rows * matrix.inputs <= kSerialQuantize) {
    kernels->quantize_rows(x, x_stride, 0, rows, matrix, out);
    return out;
  }
  const int64_t step = std::max<int64_t>(1, kSerialQuantize / matrix.inputs);
  pool.parallel_for((rows + step - 1) / step, [&](int64_t task, int) {
    kernels->quantize_rows(x, x_stride, task * step, std::min(rows, (task + 1) * step), matrix, out);
  });
  return out;
}

void Linear::forward(ThreadPool& pool, Precision precision, const float* x, int64_t x_stride,
                     int64_t rows, float* y, int64_t y_stride) const {
  if (rows == 0) return;
  const PackedMatrix& m = impl_->matrix;
  GemmArgs args{};
  args.w = &m;
  args.wide = precision == Precision::kInt16;
  args.y = y;
  args.y_stride = y_stride;
  args.dense = x;
  args.dense_stride = x_stride;
  if (is_quantized(m.format)) args.x = impl_->quantize(pool, x, x_stride, rows);

  const int64_t pairs = m.tiles / 2;
  const int64_t row_tasks = (rows + kRowsPerTask - 1) / kRowsPerTask;
  // A few tasks for each thread even the load out; more would only cost hand-outs.
  const int64_t pairs_per_task = std::max<int64_t>(1, pairs * row_tasks / (pool.size() * 16));
  const int64_t column_tasks = (pairs + pairs_per_task - 1) / pairs_per_task;
  const auto gemm = impl_->kernels->gemm[static_cast<int>(m.format)];
  pool.parallel_for(row_tasks * column_tasks, [&](int64_t task, int) {
    static thread_local Buffer scratch;
    GemmArgs mine = args;
    mine.scratch = scratch.reserve(kGemmScratchBytes);
    mine.row_begin = task / column_tasks * kRowsPerTask;
    mine.row_end = std::min(rows, mine.row_begin + kRowsPerTask);
    mine.tile_begin = task % column_tasks * pairs_per_task * 2;
    mine.tile_end = std::min(m.tiles, mine.tile_begin + pairs_per_task * 2);
    gemm(mine);
  });
}

void Linear::dequantize_row(int64_t row, float* out) const {
  const PackedMatrix& m = impl_->matrix;
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
  for (int64_t k = 0; k < m.inputs; ++k) {
    const int64_t g = k / kGroup, i = k % kGroup, segment = g / m.segment_groups;
    const uint8_t* group = tile + g * m.group_bytes;
    const auto* factors = reinterpret_cast<const int16_t*>(
        group + kGroup * kTile / (has_nibbles(m.format) ? 2 : 1));
    const int64_t half = halves(m.format) == 2 ? i / 16 : 0;
    const int factor = factors[half * kTile + column];
    const int offset = factors[(halves(m.format) + half) * kTile + column];
    const int64_t byte = i % 16 / 4 * 64 + column * 4 + kQuadOrder[i % 4];
    int t;
    if (has_nibbles(m.format)) {
      t = (i < 16 ? group[byte] & 0x0f : group[byte] >> 4) * factor + offset;
    } else {
      const auto p = static_cast<int8_t>(group[(i < 16 ? 0 : 256) + byte]);
      t = ((p * 256 * factor + (1 << 14)) >> 15) + offset;
    }
    out[k] = m.steps(row / kTile)[segment * kTile + column] * (1.0f / 256.0f) *
             static_cast<float>(t - kRounding);
  }
}

}  // namespace shoal
