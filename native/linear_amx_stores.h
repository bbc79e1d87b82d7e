// Where the sums of products on AMX tiles go.
#pragma once

#include "exp2.h"
#include "linear_kernels.h"
#include "tile_table.h"

#if defined(__AMX_BF16__)

namespace shoal::SHOAL_ISA_NAMESPACE {

// Where the sums of a pair of tiles go: to the rows of y. A tile that is not full goes by a buffer.
class TileStore {
 public:
  TileStore(const TileArgs& args, int64_t pair, int64_t tile_rows)
      : args_(args), column_(pair * 2 * kTile), tile_rows_(tile_rows) {}

  // Where tile `c` of the pair goes for the rows from `row` on.
  float* place(int64_t row, int c) {
    return is_whole(c) ? args_.y + row * args_.y_stride + column_ + c * kTile : partial_;
  }
  // Fetches what will be written of a row; what is not fetched in time, a store waits for.
  void fetch(int64_t row) const {
    const float* y = args_.y + row * args_.y_stride + column_;
    __builtin_prefetch(y, 1);
    __builtin_prefetch(y + kTile, 1);
  }
  int64_t stride_bytes(int c) const {
    return is_whole(c) ? args_.y_stride * static_cast<int64_t>(sizeof(float)) : 64;
  }
  void finish(int64_t row, int c) {
    if (is_whole(c)) return;
    const int64_t columns = args_.w->outputs - column_ - c * kTile;
    for (int64_t r = 0; r < tile_rows_; ++r) {
      float* y = args_.y + (row + r) * args_.y_stride + column_ + c * kTile;
      for (int64_t i = 0; i < columns; ++i) y[i] = partial_[r * kTile + i];
    }
  }

 private:
  bool is_whole(int c) const { return column_ + (c + 1) * kTile <= args_.w->outputs; }

  const TileArgs& args_;
  int64_t column_, tile_rows_;
  alignas(64) float partial_[kTileRowsMax * kTile];
};

// x / (1 + exp(-x)) with a relative error of 1.4e-4, for a result that is rounded to bf16; zero below -88.
SHOAL_INLINE Vec silu(Vec x) {
  const Vec one_more = Vec::broadcast(1.0f) + exp2(x * Vec::broadcast(-1.44269504f));
  return x * Vec{_mm512_rcp14_ps(one_more.v)};
}

// Where the sums of a pair of tiles of a gated matrix go: gated and rounded, to the input of the next layer.
class GatedStore {
 public:
  GatedStore(const GatedOutput& out, int64_t pair, int64_t tile_rows)
      : out_(out), column_(pair * kTile), tile_rows_(tile_rows) {}

  float* place(int64_t, int c) { return sums_[c]; }
  void fetch(int64_t row) const { __builtin_prefetch(out_.x + row * out_.stride + column_, 1); }
  int64_t stride_bytes(int) const { return 64; }
  void finish(int64_t row, int c) {
    if (c == 0) return;
    for (int64_t r = 0; r < tile_rows_; ++r) {
      // The factor last: it is large, and a gate may be zero for what it would make infinite.
      const Vec gated = silu(Vec::load(sums_[0] + r * kTile)) * Vec::load(sums_[1] + r * kTile);
      const __m256bh rounded = _mm512_cvtneps_pbh((gated * Vec::broadcast(out_.factor)).v);
      _mm256_storeu_si256(
          reinterpret_cast<__m256i*>(out_.x + (row + r) * out_.stride + column_),
          reinterpret_cast<const __m256i&>(rounded));
    }
  }

 private:
  GatedOutput out_;
  int64_t column_, tile_rows_;
  alignas(64) float sums_[2][kTileRowsMax * kTile];
};

}  // namespace shoal::SHOAL_ISA_NAMESPACE

#endif
