// Linear layers over weights packed at load: y[row] = W x[row].
//
// A row's result depends on that row alone, whatever the batch and the number of threads. Quantised
// weights are multiplied in one of two ways, whose bits differ:
// - with integers, on all instruction sets but AMX, alike on each (packed_linear.cpp, linear_kernels.h);
// - in bf16, on AMX (tile_linear.cpp, linear_amx_*).
// Dense weights are multiplied in fp32 everywhere.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>

#include "arena.h"
#include "isa.h"

namespace shoal {

class ThreadPool;

// One weight matrix, [outputs][inputs] row-major in its GGML storage type.
struct WeightSource {
  std::string type;     // "Q4_1", "Q8_0", "F16", ... as in shoal.model.weights.WeightType
  const uint8_t* data;  // the file's bytes, borrowed during the constructor only
  int64_t outputs;
  int64_t inputs;
  // The first half of the outputs gate the second half, and only `multiply_gated` will be called.
  bool gated = false;
};

// Whether `multiply_gated` works for weights of this type and outputs, with a next layer of that type.
bool can_multiply_gated(const std::string& type, int64_t outputs, const std::string& next_type);

// Activations that are multiplied as integers have 8 bits; a row's largest have 12 for the outputs from the
// `first_wide` on (and some before it: as many as are computed together). Else it is without effect.
inline constexpr int64_t kAllWide = 0;
inline constexpr int64_t kNoneWide = std::numeric_limits<int64_t>::max();

// Numbers from row to row of a matrix of fp32: an odd number of cache lines, so that neighbouring rows fall
// into different sets of the cache.
inline int64_t row_stride(int64_t columns) { return ((columns + 15) / 16 | 1) * 16; }

// Rows of fp32 activations: row r begins at x + r * stride.
struct LinearInput {
  const float* x;
  int64_t stride;
  int64_t rows;
  int64_t first_wide;
};

class Linear {
 public:
  // Packs `source` for `isa` into memory of the arena, which must outlive it. Throws std::invalid_argument for
  // an unknown type or shape.
  Linear(const WeightSource& source, Isa isa, Arena& arena);
  ~Linear();
  Linear(Linear&&) noexcept;

  int64_t outputs() const;
  int64_t inputs() const;
  bool is_gated() const;  // as its source was

  // Bytes of `rows` prepared rows; 0 where the kernels read fp32.
  int64_t prepared_bytes(int64_t rows) const;

  // Prepares the rows [begin, end) of the input for `multiply`; parts may be prepared by several
  // threads at once. `prepared` has prepared_bytes(input.rows), aligned to 64.
  void prepare(const LinearInput& input, int64_t begin, int64_t end, uint8_t* prepared) const;

  // y[r * y_stride + n] = sum_k W[n][k] x[r][k] for all rows of a prepared input and n in [0, outputs).
  // Runs on all threads of the pool; the caller is one of them.
  void multiply(ThreadPool& pool, const LinearInput& input, const uint8_t* prepared, float* y,
                int64_t y_stride) const;

  // Prepares the input of `next`: silu(gate) * up, the two halves of what `multiply` would give, all of it wide if this
  // layer is.
  void multiply_gated(ThreadPool& pool, const LinearInput& input, const uint8_t* prepared,
                      const Linear& next, uint8_t* next_prepared) const;

  // out[k] = W[row][k], dequantised: the embedding look-up. Scales and mins are as they are multiplied: but on
  // AMX integers in a unit of the row; there in half precision, mins and scales of K-quants rounded, with an
  // exponent range that starts at the matrix's largest weight.
  void dequantize_row(int64_t row, float* out) const;

  // How one way of multiplying packs and works.
  class Implementation;

 private:
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace shoal
