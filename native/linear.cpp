#include "linear.h"

#include <stdexcept>

#include "linear_implementation.h"

namespace shoal {
namespace {

std::unique_ptr<Linear::Implementation> make(const WeightSource& source, Isa isa, Arena& arena) {
  if (source.outputs <= 0) {
    throw std::invalid_argument("a weight needs at least one output, got " +
                                std::to_string(source.outputs));
  }
  const Format format = parse_format(source.type);
  row_bytes(format, source.inputs);  // checks the columns
  const bool tiles = isa == Isa::kAmx && is_quantized(format);
  return tiles ? make_tile_linear(format, source, arena)
               : make_packed_linear(format, source, isa, arena);
}

}  // namespace

Linear::Linear(const WeightSource& source, Isa isa, Arena& arena)
    : implementation_(make(source, isa, arena)) {}
Linear::~Linear() = default;
Linear::Linear(Linear&&) noexcept = default;

int64_t Linear::outputs() const { return implementation_->outputs(); }
int64_t Linear::inputs() const { return implementation_->inputs(); }
int64_t Linear::packed_bytes() const { return implementation_->packed_bytes(); }

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

void Linear::dequantize_row(int64_t row, float* out) const {
  implementation_->dequantize_row(row, out);
}

}  // namespace shoal
