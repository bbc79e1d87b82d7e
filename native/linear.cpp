#include "linear.h"

#include <atomic>
#include <stdexcept>

#include "linear_implementation.h"
#include "pack_rows.h"

namespace shoal {
namespace {

void require_finite(Format format, const WeightSource& source) {
  const int64_t stride = row_bytes(format, source.inputs);
  std::atomic<bool> is_finite{true};
  pack_rows(source.outputs, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (!is_finite_row(format, source.data + row * stride, source.inputs)) is_finite = false;
    }
  });
  if (!is_finite) throw std::invalid_argument("a weight is not finite");
}

std::unique_ptr<Linear::Implementation> make(const WeightSource& source, Isa isa, Arena& arena) {
  if (source.outputs <= 0) {
    throw std::invalid_argument("a weight needs at least one output, got " +
                                std::to_string(source.outputs));
  }
  const Format format = parse_format(source.type);
  require_finite(format, source);
  if (source.gated && !can_multiply_gated(source.type, source.outputs, source.type)) {
    throw std::invalid_argument("gates of " + std::to_string(source.outputs) + " outputs of " +
                                source.type + " can't be multiplied");
  }
  const bool tiles = isa == Isa::kAmx && is_quantized(format);
  return tiles ? make_tile_linear(format, source, arena)
               : make_packed_linear(format, source, isa, arena);
}

}  // namespace

bool can_multiply_gated(const std::string& type, int64_t outputs, const std::string& next_type) {
  constexpr int64_t kTileOutputs = 16;
  return is_quantized(parse_format(type)) && is_quantized(parse_format(next_type)) &&
         outputs % (2 * kTileOutputs) == 0;
}

Linear::Linear(const WeightSource& source, Isa isa, Arena& arena)
    : implementation_(make(source, isa, arena)) {}
Linear::~Linear() = default;
Linear::Linear(Linear&&) noexcept = default;

int64_t Linear::outputs() const { return implementation_->outputs(); }
int64_t Linear::inputs() const { return implementation_->inputs(); }
bool Linear::is_gated() const { return implementation_->is_gated(); }

int64_t Linear::prepared_bytes(int64_t rows) const {
  return implementation_->prepared_bytes(rows);
}

void Linear::prepare(const LinearInput& input, int64_t begin, int64_t end,
                     uint8_t* prepared) const {
  implementation_->prepare(input, begin, end, prepared);
}

void Linear::multiply(ThreadPool& pool, const LinearInput& input, const uint8_t* prepared,
                      float* y, int64_t y_stride) const {
  if (input.rows > 0) implementation_->multiply(pool, input, prepared, y, y_stride);
}

void Linear::multiply_gated(ThreadPool& pool, const LinearInput& input, const uint8_t* prepared,
                            const Linear& next, uint8_t* next_prepared) const {
  if (input.rows == 0) return;
  implementation_->multiply_gated(pool, input, prepared, *next.implementation_, next_prepared);
}

void Linear::dequantize_row(int64_t row, float* out) const {
  implementation_->dequantize_row(row, out);
}

}  // namespace shoal
