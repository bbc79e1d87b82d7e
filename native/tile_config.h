// The configuration of the tile registers that all kernels on AMX share.
#pragma once

#include "vec.h"

#if defined(__AMX_BF16__)

namespace shoal::SHOAL_ISA_NAMESPACE {

inline constexpr int kTileBytes = 1024;  // 16 rows of 32 bf16 or 64 int8

// Layout of Intel's tile configuration, palette 1. Registers 0 to 3 accumulate and 4 and 5 hold A, of `rows`
// rows each; 6 and 7 hold B, of 16. Rows of A and B are 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {};

  explicit TileConfig(int64_t rows_of_a) {
    for (int tile = 0; tile < 6; ++tile) rows[tile] = static_cast<uint8_t>(rows_of_a);
    rows[6] = rows[7] = 16;
  }
  SHOAL_INLINE void load() const {
    // GCC 12 believes that the intrinsic reads 8 bytes only and would drop the stores to the rest.
    asm volatile("" : : "r"(this) : "memory");
    _tile_loadconfig(this);
  }
};

}  // namespace shoal::SHOAL_ISA_NAMESPACE

#endif
