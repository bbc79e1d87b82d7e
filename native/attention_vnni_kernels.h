// Attention in int8 on AVX-512 VNNI: up to 12 rows to one chunk of 256 keys at a time.
//
// A product takes unsigned bytes times signed ones. Keys become unsigned by adding 128, for which their sums
// start at -128 times the sum of the query's bytes; weights of values are unsigned already. Keys and values
// are read from the KV buffer as they lie there.
#pragma once

#include "attention_int8_kernels.h"

#if defined(__AVX512VNNI__) && !defined(__AMX_INT8__)

namespace shoal::SHOAL_ISA_NAMESPACE {

// Four bytes, in all lanes.
SHOAL_INLINE __m512i broadcast_bytes(const void* p) {
  int32_t quad;
  __builtin_memcpy(&quad, p, sizeof quad);
  return _mm512_set1_epi32(quad);
}

inline constexpr int64_t kRowsAtOnce = 2 * kTileRows;  // whole register tiles
static_assert(kRowsAtOnce <= kTileQueries);

// One tile of queries and one chunk of keys on the vector unit.
class VectorAttention : public Int8Attention {
 public:
  VectorAttention(const AttentionShape& shape, const AttentionTile& tile, int64_t index,
                  const UpcomingBlocks& upcoming, const AttentionScratch& scratch)
      : Int8Attention(shape, tile, index, upcoming, scratch) {}

  bool run(float* states) {
    return Int8Attention::run(states, [&]() __attribute__((always_inline)) {
      for (int64_t row = 0; row < rows_; row += kRowsAtOnce) {
        const int64_t count = rows_ - row < kRowsAtOnce ? rows_ - row : kRowsAtOnce;
        attend(row, count, states + row * chunk_.shape.state_floats());
      }
    });
  }

 private:
  struct Blocks {
    int64_t begin, end;
  };

  void attend(int64_t row, int64_t count, float* states) {
    Rows rows = rows_from(row, count);
    const int64_t first = rows.first[0], last = rows.last[count - 1];
    const Blocks blocks{first / kLanes, (last + kLanes - 1) / kLanes};
    multiply_keys(rows, blocks);
    weigh(rows, {first / kDepth, (last + kDepth - 1) / kDepth});
    for_row_tiles(count, [&]<int kRows>(int64_t r) {
      multiply_values<kRows>(r, blocks, states);
    });
    for (int64_t r = 0; r < count; ++r) add_large_weights(rows, r, states);
    store_maxima_and_sums(rows, states);
  }

  // Products of the queries and the keys of the blocks, into the scores.
  void multiply_keys(const Rows& rows, const Blocks& blocks) {
    int32_t start[kTileQueries];
    for (int64_t r = 0; r < rows.count; ++r) start[r] = -128 * sum_of_quants(rows.q[r]);
    int64_t block = blocks.begin;
    for (; block + kTileVecs <= blocks.end; block += kTileVecs) {
      multiply_keys<kTileVecs>(rows, start, block);
    }
    for (; block < blocks.end; ++block) multiply_keys<1>(rows, start, block);
  }
  template <int kBlocks>
  void multiply_keys(const Rows& rows, const int32_t* start, int64_t block) {
    fetch_.fetch(kBlocks * fetches_);
    for_row_tiles(rows.count, [&]<int kRows>(int64_t r) {
      multiply_keys<kRows, kBlocks>(rows.q + r, start + r, block, chunk_.scores + r * kChunkTokens);
    });
  }
  template <int kRows, int kBlocks>
  SHOAL_INLINE void multiply_keys(const float* const* q, const int32_t* start, int64_t block,
                                  float* scores) const {
    const __m512i sign = _mm512_set1_epi8(-128);
    const int8_t* k[kBlocks];
    for (int b = 0; b < kBlocks; ++b) k[b] = reinterpret_cast<const int8_t*>(chunk_.blocks[block + b]);
    __m512i sum[kRows][kBlocks];
    for (int r = 0; r < kRows; ++r) {
      for (int b = 0; b < kBlocks; ++b) sum[r][b] = _mm512_set1_epi32(start[r]);
    }
    for (int64_t d = 0; d < chunk_.shape.head_dim; d += 4) {
      __m512i keys[kBlocks];
      for (int b = 0; b < kBlocks; ++b) {
        keys[b] = _mm512_xor_si512(_mm512_loadu_si512(k[b] + d * kLanes), sign);
      }
      for (int r = 0; r < kRows; ++r) {
        const __m512i x = broadcast_bytes(q[r] + d / 4);
        for (int b = 0; b < kBlocks; ++b) sum[r][b] = _mm512_dpbusd_epi32(sum[r][b], keys[b], x);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      float* const out = scores + r * kChunkTokens + block * kLanes;
      for (int b = 0; b < kBlocks; ++b) _mm512_storeu_si512(out + b * kLanes, sum[r][b]);
    }
  }

  int32_t sum_of_quants(const float* q) const {
    const int64_t head_dim = chunk_.shape.head_dim;
    __m512i sum = _mm512_setzero_si512();
    for (int64_t d = 0; d < head_dim; d += kDepth) {
      const __m512i quants = _mm512_maskz_loadu_epi8(bits_between(0, head_dim - d), q + d / 4);
      sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), quants);
    }
    return _mm512_reduce_add_epi32(sum);
  }

  // The weights times the values of the blocks, into the states.
  template <int kRows>
  void multiply_values(int64_t row, const Blocks& blocks, float* states) {
    const int64_t columns = chunk_.shape.head_dim / kLanes;
    int64_t column = 0;
    for (; column + kTileVecs <= columns; column += kTileVecs) {
      multiply_values<kRows, kTileVecs>(row, column, blocks, states);
    }
    for (; column < columns; ++column) multiply_values<kRows, 1>(row, column, blocks, states);
  }
  template <int kRows, int kColumns>
  SHOAL_INLINE void multiply_values(int64_t row, int64_t column, const Blocks& blocks,
                                    float* states) {
    __m512i sum[kRows][kColumns];
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kColumns; ++c) sum[r][c] = _mm512_setzero_si512();
    }
    for (int64_t block = blocks.begin; block < blocks.end; ++block) {
      if (column == 0) fetch_.fetch(fetches_);
      const int8_t* v = values(block, column);
      const uint8_t* weights = low_ + row * kChunkTokens + block / 4 * kDepth + block % 4 * 4;
      for (int part = 0; part < 4; ++part, v += kDepth, weights += kLanes) {
        for (int r = 0; r < kRows; ++r) {
          const __m512i x = broadcast_bytes(weights + r * kChunkTokens);
          for (int c = 0; c < kColumns; ++c) {
            sum[r][c] = _mm512_dpbusd_epi32(sum[r][c], x, _mm512_loadu_si512(v + c * kLanes * kLanes));
          }
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      float* const out = accumulators(states, row + r, column);
      for (int c = 0; c < kColumns; ++c) _mm512_storeu_si512(out + c * kLanes, sum[r][c]);
    }
  }

  // Adds what weights above 255 lack in the lower plane, and turns sums into accumulators.
  void add_large_weights(const Rows& rows, int64_t row, float* states) const {
    const int64_t columns = chunk_.shape.head_dim / kLanes;
    int64_t column = 0;
    for (; column + kTileVecs <= columns; column += kTileVecs) {
      add_large_weights<kTileVecs>(rows, row, column, states);
    }
    for (; column < columns; ++column) add_large_weights<1>(rows, row, column, states);
  }
  template <int kColumns>
  SHOAL_INLINE void add_large_weights(const Rows& rows, int64_t row, int64_t column,
                                      float* states) const {
    __m512i high[kColumns];
    for (int c = 0; c < kColumns; ++c) high[c] = _mm512_setzero_si512();
    for (uint64_t large = rows.large[row]; large != 0; large &= large - 1) {
      const int place = __builtin_ctzll(large);  // 4 groups of 4 parts of 4 blocks
      const int8_t* const v = values(place / 16 * 4 + place % 4, column) + place / 4 % 4 * kDepth;
      const __m512i x = broadcast_bytes(high_ + row * kChunkTokens + place * 4);
      for (int c = 0; c < kColumns; ++c) {
        high[c] = _mm512_dpbusd_epi32(high[c], x, _mm512_loadu_si512(v + c * kLanes * kLanes));
      }
    }
    float* const out = accumulators(states, row, column);
    for (int c = 0; c < kColumns; ++c) {
      const __m512i low = _mm512_loadu_si512(out + c * kLanes);
      store_accumulators(high[c], low, rows.power[row], out + c * kLanes);
    }
  }

  float* accumulators(float* states, int64_t row, int64_t column) const {
    return states + row * chunk_.shape.state_floats() + kLanes + column * kLanes;
  }
  const int8_t* values(int64_t block, int64_t column) const {
    return reinterpret_cast<const int8_t*>(chunk_.blocks[block]) +
           kLanes * (chunk_.shape.head_dim + column * kLanes);
  }
};

}  // namespace shoal::SHOAL_ISA_NAMESPACE

#endif
