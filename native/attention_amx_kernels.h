// Attention in int8 on AMX: up to 16 rows, those of a tile, to one chunk of 256 keys at a time.
#pragma once

#include "attention_int8_kernels.h"
#include "tile_config.h"

#if defined(__AMX_INT8__)

namespace shoal::SHOAL_ISA_NAMESPACE {

// One tile of queries and one chunk of keys on the tile unit.
class TileAttention : public Int8Attention {
 public:
  TileAttention(const AttentionShape& shape, const AttentionTile& tile, int64_t index,
                const UpcomingBlocks& upcoming, const AttentionScratch& scratch)
      : Int8Attention(shape, tile, index, upcoming, scratch),
        depth_((shape.head_dim + kDepth - 1) / kDepth * kDepth),
        sums_(reinterpret_cast<int32_t*>(low_ + kTileQueries * kChunkTokens)),
        queries_(reinterpret_cast<int8_t*>(value_scales_ + kChunkTokens)),
        values_(queries_ + kTileQueries * depth_),
        keys_(values_ + kChunkTokens * shape.head_dim) {
    for (int64_t b = chunk_.first_block; b < chunk_.last_block; ++b) {
      keys_of_[b] = reinterpret_cast<const int8_t*>(chunk_.blocks[b]);
    }
  }

  bool run(float* states) {
    return Int8Attention::run(states, [&]() __attribute__((always_inline)) {
      if (chunk_.shape.head_dim < kDepth) copy_keys();
      int64_t configured = 0;
      for (int64_t row = 0; row < rows_; row += kTileQueries) {
        const int64_t count = rows_ - row < kTileQueries ? rows_ - row : kTileQueries;
        if (count != configured) TileConfig(count).load();
        configured = count;
        attend(row, count, states + row * chunk_.shape.state_floats());
      }
      _tile_release();
    });
  }

 private:
  void attend(int64_t row, int64_t count, float* states) {
    Rows rows = rows_from(row, count);
    load_queries(rows);
    multiply_keys(rows.first[0] / kLanes, (rows.last[count - 1] + kLanes - 1) / kLanes);
    const Groups groups{rows.first[0] / kDepth, (rows.last[count - 1] + kDepth - 1) / kDepth};
    weigh(rows, groups);
    if (row == 0) copy_values();
    const int64_t columns = chunk_.shape.head_dim / kLanes;
    for (int64_t column = 0; column < columns; column += 2) {
      if (column + 1 < columns) {
        multiply_values<2>(column, groups);
        store_column(rows, 0, column, states);
        store_column(rows, 1, column + 1, states);
      } else {
        multiply_values<1>(column, groups);
        store_column(rows, 0, column, states);
      }
    }
    store_maxima_and_sums(rows, states);
  }

  void load_queries(const Rows& rows) {
    const int64_t head_dim = chunk_.shape.head_dim;
    for (int64_t r = 0; r < rows.count; ++r) {
      int8_t* const out = queries_ + r * depth_;
      for (int64_t d = 0; d < depth_; d += kDepth) {
        const __mmask64 dimensions = bits_between(0, head_dim - d);
        _mm512_storeu_si512(out + d, _mm512_maskz_loadu_epi8(dimensions, rows.q[r] + d / 4));
      }
    }
  }

  // Keys of less than a tile are copied: the rest of the tile must not lie outside the KV buffer. What it
  // holds is multiplied by zeros, as is what follows the keys of other heads.
  void copy_keys() {
    for (int64_t block = chunk_.first_block; block < chunk_.last_block; ++block) {
      int8_t* const to = keys_ + block * kTileBytes;
      for (int64_t i = 0; i < kLanes * chunk_.shape.head_dim; i += kDepth) {
        _mm512_storeu_si512(to + i, _mm512_loadu_si512(keys_of_[block] + i));
      }
      keys_of_[block] = to;
    }
  }

  // Products of the queries and the keys of the blocks, into the scores.
  void multiply_keys(int64_t first_block, int64_t end_block) {
    int64_t block = first_block;
    for (; block + 4 <= end_block; block += 4) multiply_keys<4>(block);
    for (; block < end_block; ++block) multiply_keys<1>(block);
  }
  template <int kBlocks>
  SHOAL_INLINE void multiply_keys(int64_t block) {
    const int8_t* const* k = keys_of_ + block;
    fetch_.fetch(kBlocks * fetches_);
    _tile_zero(0);
    if constexpr (kBlocks == 4) {
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t d = 0; d < depth_; d += kDepth) {
      _tile_loadd(4, queries_ + d, depth_);
      _tile_loadd(6, k[0] + d * kLanes, kDepth);
      _tile_dpbssd(0, 4, 6);
      if constexpr (kBlocks == 4) {
        _tile_loadd(7, k[1] + d * kLanes, kDepth);
        _tile_dpbssd(1, 4, 7);
        _tile_loadd(6, k[2] + d * kLanes, kDepth);
        _tile_dpbssd(2, 4, 6);
        _tile_loadd(7, k[3] + d * kLanes, kDepth);
        _tile_dpbssd(3, 4, 7);
      }
    }
    constexpr int64_t kStride = kChunkTokens * sizeof(float);
    float* const out = chunk_.scores + block * kLanes;
    _tile_stored(0, out, kStride);
    if constexpr (kBlocks == 4) {
      _tile_stored(1, out + kLanes, kStride);
      _tile_stored(2, out + 2 * kLanes, kStride);
      _tile_stored(3, out + 3 * kLanes, kStride);
    }
  }

  // Puts the values of each four blocks together to tiles of full depth; the quants of a token that nobody
  // sees are multiplied by zero, whatever they are.
  void copy_values() {
    const int64_t head_dim = chunk_.shape.head_dim;
    for (int64_t block = chunk_.first_block; block < chunk_.last_block; ++block) {
      fetch_.fetch(fetches_);
      const auto* line = reinterpret_cast<const int8_t*>(chunk_.blocks[block]) + kLanes * head_dim;
      int8_t* out = value_tile(block / 4, 0) + block % 4 * kDepth;
      for (int64_t d = 0; d < head_dim; d += kLanes, out += kTileBytes) {
        for (int part = 0; part < 4; ++part, line += kDepth) {
          _mm512_storeu_si512(out + 4 * part * kDepth, _mm512_loadu_si512(line));
        }
      }
    }
  }
  int8_t* value_tile(int64_t group, int64_t column) const {
    return values_ + group * kDepth * chunk_.shape.head_dim + column * kTileBytes;
  }

  // Both planes of the weights times one or two columns of 16 dimensions, into sums_.
  template <int kColumns>
  void multiply_values(int64_t column, const Groups& groups) const {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kColumns == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t group = groups.begin; group < groups.end; ++group) {
      const int8_t* const v = value_tile(group, column);
      _tile_loadd(4, high_ + group * kDepth, kChunkTokens);
      _tile_loadd(6, v, kDepth);
      _tile_dpbusd(0, 4, 6);
      _tile_loadd(5, low_ + group * kDepth, kChunkTokens);
      _tile_dpbusd(1, 5, 6);
      if constexpr (kColumns == 2) {
        _tile_loadd(7, v + kTileBytes, kDepth);
        _tile_dpbusd(2, 4, 7);
        _tile_dpbusd(3, 5, 7);
      }
    }
    _tile_stored(0, sums_, kDepth);
    _tile_stored(1, sums_ + kTileBytes / 4, kDepth);
    if constexpr (kColumns == 2) {
      _tile_stored(2, sums_ + 2 * kTileBytes / 4, kDepth);
      _tile_stored(3, sums_ + 3 * kTileBytes / 4, kDepth);
    }
  }

  void store_column(const Rows& rows, int place, int64_t column, float* states) const {
    const int32_t* high = sums_ + 2 * place * kTileBytes / 4;
    float* out = states + kLanes + column * kLanes;
    for (int64_t r = 0; r < rows.count; ++r, out += chunk_.shape.state_floats(), high += kLanes) {
      store_accumulators(_mm512_loadu_si512(high), _mm512_loadu_si512(high + kTileBytes / 4),
                         rows.power[r], out);
    }
  }

  int64_t depth_;    // head_dim, rounded up to whole products
  int32_t* sums_;    // [2 columns][2 planes][16][16 dimensions]
  int8_t* queries_;  // [16][depth_]
  int8_t* values_;   // [groups][head_dim / 16][16][16 dimensions][4 tokens]
  int8_t* keys_;     // [blocks][16][16 tokens][4 dimensions], if head_dim is below 64
  const int8_t* keys_of_[kChunkBlocks];  // in the KV buffer, or the copy
};

}  // namespace shoal::SHOAL_ISA_NAMESPACE

#endif
