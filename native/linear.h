// Linear layers over weights packed at load: y[row] = W x[row] + b.
//
// A row's result depends on that row alone: activations are quantised per row in groups of 32
// columns, to 8 bits, or to 12 where a model is most sensitive; products are summed exactly as int32 inside a group, and groups are added in ascending
// order in fp32. Every instruction set and every batch size gives the same bits.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "isa.h"

namespace shoal {

class ThreadPool;

// One weight matrix, [outputs][inputs] row-major in its GGML storage type.
struct WeightSource {
  std::string type;     // "Q4_1", "Q8_0", "F16", ... as in shoal.model.weights.WeightType
  const uint8_t* data;  // the file's bytes, borrowed during the constructor only
  int64_t outputs;
  int64_t inputs;
};

// Bits of the quantised activations; formats that aren't quantised ignore it.
enum class Precision { kInt8, kInt12 };

class Linear {
 public:
  // Packs `source` for `isa`. Throws std::invalid_argument for an unknown type or shape.
  Linear(const WeightSource& source, Isa isa);
  ~Linear();
  Linear(Linear&&) noexcept;

  int64_t outputs() const;
  int64_t inputs() const;

  // y[r * y_stride + n] = sum_k W[n][k] x[r * x_stride + k] for r in [0, rows), n in [0, outputs).
  // Runs on all threads of the pool; the caller is one of them.
  void forward(ThreadPool& pool, Precision precision, const float* x, int64_t x_stride,
               int64_t rows, float* y, int64_t y_stride) const;

  // out[k] = W[row][k], dequantised: the embedding look-up. Exact.
  void dequantize_row(int64_t row, float* out) const;

  // Bytes that one forward pass reads.
  int64_t packed_bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace shoal
