#include "linear.h"

#include <algorithm>
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
constexpr int64_t kRowsPerTask = 128;
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
  for (int k = 0; k < kGroup; ++k) {
    const int64_t byte = k % 16 / 4 * 64 + column * 4 + k % 4;
    if (has_nibbles(m.format)) {
      tile[g * 256 + byte] |= static_cast<uint8_t>(group.q[k] << (k < 16 ? 0 : 4));
    } else {
      tile[g * 512 + (k < 16 ? 0 : 256) + byte] = group.q[k];
    }
  }
  const bool half = has_half_scales(m.format);
  for (int h = 0; h < halves(m.format); ++h) {
    store_scale(half, tile + m.scale_offset, (g * halves(m.format) + h) * kTile + column,
                group.scale[h]);
  }
  if (has_min(m.format)) store_scale(half, tile + m.min_offset, g * kTile + column, group.min);
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
    m.tile_bytes = round_up(m.min_offset + (has_min(format) ? scale_bytes : 0), kAlignment);
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
  QuantizedRows quantize(ThreadPool& pool, Precision precision, const float* x, int64_t x_stride,
                         int64_t rows) const;
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
    for (int64_t g = 0; g < matrix.groups(); ++g) {
      pack_group(decode_group(matrix.format, row, g), matrix, tile, g, n % kTile);
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

QuantizedRows Linear::Impl::quantize(ThreadPool& pool, Precision precision, const float* x,
                                     int64_t x_stride, int64_t rows) const {
  const bool wide = precision == Precision::kInt12;
  const int64_t padded = round_up(rows, kRowPadding);
  const int64_t factors = padded / kRowPadding * matrix.groups();
  static thread_local Buffer buffer;
  uint8_t* p = buffer.reserve(factors * static_cast<int64_t>(sizeof(GroupFactors)) +
                              padded * matrix.inputs * (wide ? 2 : 1));
  QuantizedRows out{};
  out.factors = reinterpret_cast<GroupFactors*>(p);
  out.q = reinterpret_cast<int8_t*>(out.factors + factors);
  out.wide = wide;
  const auto quantize_rows = kernels->quantize_rows[wide][halves(matrix.format) == 2];
  if (rows * matrix.inputs <= kSerialQuantize) {
    quantize_rows(x, x_stride, 0, rows, matrix.inputs, out);
    return out;
  }
  const int64_t step = std::max<int64_t>(1, kSerialQuantize / matrix.inputs);
  pool.parallel_for((rows + step - 1) / step, [&](int64_t task, int) {
    quantize_rows(x, x_stride, task * step, std::min(rows, (task + 1) * step),
                           matrix.inputs, out);
  });
  return out;
}

void Linear::forward(ThreadPool& pool, Precision precision, const float* x, int64_t x_stride,
                     int64_t rows, float* y, int64_t y_stride) const {
  if (rows == 0) return;
  const PackedMatrix& m = impl_->matrix;
  GemmArgs args{};
  args.w = &m;
  args.y = y;
  args.y_stride = y_stride;
  args.dense = x;
  args.dense_stride = x_stride;
  if (is_quantized(m.format)) args.x = impl_->quantize(pool, precision, x, x_stride, rows);

  const int64_t pairs = m.tiles / 2;
  const int64_t row_tasks = (rows + kRowsPerTask - 1) / kRowsPerTask;
  // A few tasks for each thread even the load out; more would only cost hand-outs.
  const int64_t pairs_per_task = std::max<int64_t>(1, pairs * row_tasks / (pool.size() * 16));
  const int64_t column_tasks = (pairs + pairs_per_task - 1) / pairs_per_task;
  const auto gemm = impl_->kernels->gemm[static_cast<int>(m.format)];
  pool.parallel_for(row_tasks * column_tasks, [&](int64_t task, int) {
    static thread_local Buffer scratch;
    GemmArgs mine = args;
    mine.scratch = scratch.reserve(gemm_scratch_bytes(m.inputs));
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
  constexpr int kZero[] = {0, 8, 128, 0, 0, 32};  // Q4_1, Q4_0, Q8_0, Q4_K, Q5_K, Q6_K
  const int zero = kZero[static_cast<int>(m.format)];
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
      out[k] += load_scale(half, tile + m.min_offset, g * kTile + column);
    }
  }
}

}  // namespace shoal
