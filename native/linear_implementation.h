// What each way of multiplying implements; see linear.h for the meaning of the calls.
#pragma once

#include <memory>

#include "linear.h"
#include "quant_blocks.h"

namespace shoal {

class Linear::Implementation {
 public:
  virtual ~Implementation() = default;
  virtual int64_t outputs() const = 0;
  virtual int64_t inputs() const = 0;
  virtual bool is_gated() const = 0;
  virtual int64_t prepared_bytes(int64_t rows) const = 0;
  virtual void prepare(const LinearInput& input, int64_t begin, int64_t end,
                       uint8_t* prepared) const = 0;
  virtual void multiply(ThreadPool& pool, const LinearInput& input, const uint8_t* prepared, float* y,
                        int64_t y_stride) const = 0;
  virtual void multiply_gated(ThreadPool& pool, const LinearInput& input, const uint8_t* prepared,
                              const Implementation& next, uint8_t* next_prepared) const = 0;
  virtual void dequantize_row(int64_t row, float* out) const = 0;
};

// Both expect a shape that `Linear` has checked.
std::unique_ptr<Linear::Implementation> make_packed_linear(Format format,
                                                           const WeightSource& source, Isa isa,
                                                           Arena& arena);
std::unique_ptr<Linear::Implementation> make_tile_linear(Format format,
                                                         const WeightSource& source, Arena& arena);

}  // namespace shoal
