// Attention on AMX int8 tiles: 16 rows to one chunk of 256 keys at a time.
//
// Queries, keys and values are of 8 bits with a scale for each head of a token (kv_int8_kernels.h), the
// weights of a row of 16 bits with a common power of two, in two planes. Sums of products are exact, so the
// arithmetic of a row depends on that row and its own keys alone: a key that it doesn't see weighs exactly
// zero, and what is common to its keys, the largest score and the largest scale of a value, is taken from
// those that it sees. The sum of the weights is of those before rounding, lane by lane (token mod 64).
#pragma once

#include "attention_amx_weights.h"
#include "attention_kernels.h"
#include "kv_int8_kernels.h"
#include "tile_config.h"

#if defined(__AMX_INT8__)

namespace shoal::SHOAL_ISA_NAMESPACE {

inline constexpr int kTileQueries = 16;  // rows of a tile

// Fetches the blocks of the next chunk, some lines of the cache at a time.
class ChunkFetch {
 public:
  ChunkFetch(const AttentionShape& shape, const UpcomingChunk& next)
      : next_(next),
        block_halves_(shape.block_halves),
        head_halves_(kBlockSize * (shape.head_dim + 2)),
        place_(head_halves_) {}

  int64_t lines() const { return next_.num_blocks * (head_halves_ / kLineHalves); }

  void fetch(int64_t lines) {
    for (; lines > 0; --lines, place_ += kLineHalves) {
      if (place_ == head_halves_) {
        if (next_.num_blocks == 0) return;
        block_ = next_.kv + *next_.blocks++ * block_halves_;
        --next_.num_blocks;
        place_ = 0;
      }
      _mm_prefetch(reinterpret_cast<const char*>(block_ + place_), _MM_HINT_T1);
    }
  }

 private:
  static constexpr int64_t kLineHalves = 32;

  UpcomingChunk next_;
  int64_t block_halves_, head_halves_;
  const uint16_t* block_ = nullptr;
  int64_t place_;
};

// One tile of queries and one chunk of keys on the tile unit.
class TileAttention {
 public:
  TileAttention(const AttentionShape& shape, const AttentionTile& tile, int64_t index,
                const UpcomingChunk& next, const AttentionScratch& scratch)
      : chunk_{shape, tile, {}, index * kChunkTokens, 0, 0, scratch.scores},
        rows_(tile.num_queries * shape.group),
        first_(chunk_.first_key(0)),
        last_(chunk_.last_key(rows_ - 1)),
        depth_((shape.head_dim + kDepth - 1) / kDepth * kDepth),
        sums_(reinterpret_cast<int32_t*>(scratch.scores + kTileQueries * kChunkTokens)),
        high_(reinterpret_cast<uint8_t*>(sums_ + 4 * kTileQueries * kLanes)),
        low_(high_ + kTileQueries * kChunkTokens),
        key_scales_(scratch.blocks),
        value_scales_(key_scales_ + kChunkTokens),
        queries_(reinterpret_cast<int8_t*>(value_scales_ + kChunkTokens)),
        values_(queries_ + kTileQueries * depth_),
        keys_(values_ + kChunkTokens * shape.head_dim),
        fetch_(shape, next) {
    chunk_.first_block = first_ / kLanes;
    chunk_.last_block = (last_ + kLanes - 1) / kLanes;
    const int64_t visits = 2 * (chunk_.last_block - chunk_.first_block);  // of keys and of values
    fetches_ = visits > 0 ? (fetch_.lines() + visits - 1) / visits : 0;
    for (int64_t b = chunk_.first_block; b < chunk_.last_block; ++b) {
      chunk_.blocks[b] = tile.kv + tile.block_table[index * kChunkBlocks + b] * shape.block_halves;
      keys_of_[b] = reinterpret_cast<const int8_t*>(chunk_.blocks[b]);
    }
  }

  // Whether the states are right: of rows that see a value that is not finite, and rows that don't, only
  // one kind can be done at a time.
  bool run(float* states) {
    if (first_ >= last_) {
      see_nothing(states);
      return true;
    }
    const bool values_are_finite = load_scales();
    if (!values_are_finite && chunk_.tile.num_queries > 1) return false;
    if (chunk_.shape.head_dim < kDepth) copy_keys();
    int64_t configured = 0;
    for (int64_t row = 0; row < rows_; row += kTileQueries) {
      const int64_t count = rows_ - row < kTileQueries ? rows_ - row : kTileQueries;
      if (count != configured) TileConfig(count).load();
      configured = count;
      attend(row, count, states + row * chunk_.shape.state_floats());
    }
    _tile_release();
    if (values_are_finite) return true;
    for (int64_t row = 0; row < rows_; ++row) {
      states[row * chunk_.shape.state_floats() + 1] = __builtin_nanf("");
    }
    return true;
  }

 private:
  void see_nothing(float* states) const {
    const int64_t size = chunk_.shape.state_floats();
    for (int64_t i = 0; i < rows_ * size; i += kLanes) Vec::zero().store(states + i);
    for (int64_t row = 0; row < rows_; ++row) states[row * size] = kMasked;
  }

  struct Groups {  // of four blocks
    int64_t begin, end;
  };

  // Rows that are attended together: where they lie and what is known of their scores.
  struct Rows {
    int64_t count = 0;
    const float* q[kTileQueries];
    int64_t first[kTileQueries], last[kTileQueries];  // keys seen, relative to the chunk
    float maximum[kTileQueries], sum[kTileQueries], power[kTileQueries];
    float scale[kTileQueries];  // of the scores
  };

  Rows rows_from(int64_t row, int64_t count) const {
    const AttentionShape& shape = chunk_.shape;
    const float scale = shape.scale / static_cast<float>(rotation_size(shape.head_dim));
    Rows rows;
    int64_t head = row % shape.group;
    for (; rows.count < count; ++rows.count, ++row, ++head) {
      const bool same_query = rows.count > 0 && head < shape.group;
      if (head == shape.group) head = 0;
      const int64_t r = rows.count;
      rows.q[r] = same_query ? rows.q[r - 1] + shape.head_dim : chunk_.query(row);
      rows.first[r] = same_query ? rows.first[r - 1] : chunk_.first_key(row);
      rows.last[r] = same_query ? rows.last[r - 1] : chunk_.last_key(row);
      rows.scale[r] = rows.q[r][shape.head_dim / 4] * scale;
    }
    return rows;
  }

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
    for (int64_t r = 0; r < count; ++r, states += chunk_.shape.state_floats()) {
      states[0] = rows.maximum[r];
      states[1] = rows.sum[r];
    }
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

  void weigh(Rows& rows, const Groups& groups) const {
    const AttentionShape& shape = chunk_.shape;
    const bool is_capped = shape.soft_cap > 0.0f;
    const auto weight_row = [&](int64_t r) __attribute__((always_inline)) {
      return WeightRow{chunk_.scores + r * kChunkTokens,
                       high_ + r * kChunkTokens,
                       low_ + r * kChunkTokens,
                       key_scales_,
                       value_scales_,
                       rows.first[r],
                       rows.last[r]};
    };
    // All maxima first: else each row would wait for its own.
    for (int64_t r = 0; r < rows.count; ++r) {
      const bool sees_any = rows.first[r] < rows.last[r];
      rows.maximum[r] = sees_any ? weight_row(r).score(rows.scale[r], shape.soft_cap) : kMasked;
      const bool same_query =
          r > 0 && rows.first[r] == rows.first[r - 1] && rows.last[r] == rows.last[r - 1];
      rows.power[r] = same_query ? rows.power[r - 1] : weight_row(r).power();
    }
    for (int64_t r = 0; r < rows.count; ++r) {
      const WeightRow row = weight_row(r);
      rows.sum[r] = 0.0f;
      if (row.first >= row.last) {
        row.clear(groups.begin, groups.end);
        continue;
      }
      const float scale = is_capped ? 1.0f : rows.scale[r];
      const float sum = row.weigh(rows.maximum[r], scale, rows.power[r], groups.begin, groups.end);
      rows.sum[r] = scale_by_power(sum, -rows.power[r]);
      rows.maximum[r] *= scale;
    }
  }

  // The scales of all keys and values that a row sees, and of their neighbours in groups. Returns whether
  // those of the values are finite.
  bool load_scales() {
    Vec poison = Vec::zero();
    for (int64_t block = chunk_.first_block; block < chunk_.last_block; ++block) {
      const uint16_t* scales = chunk_.blocks[block] + kBlockSize * chunk_.shape.head_dim;
      const int64_t begin = block * kLanes;
      const auto seen = static_cast<__mmask16>(bits_between(first_ - begin, last_ - begin));
      const Vec v = {_mm512_maskz_mov_ps(seen, Vec::load_bf16(scales + kLanes).v)};
      Vec::load_bf16(scales).store(key_scales_ + begin);
      v.store(value_scales_ + begin);
      poison = fma(v, Vec::zero(), poison);
    }
    return _mm512_cmp_ps_mask(poison.v, poison.v, _CMP_UNORD_Q) == 0;
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

  // At most 65,535 x 127 x 256 in magnitude, hence exact in int32 also together.
  void store_column(const Rows& rows, int place, int64_t column, float* states) const {
    const int32_t* high = sums_ + 2 * place * kTileBytes / 4;
    float* out = states + kLanes + column * kLanes;
    for (int64_t r = 0; r < rows.count; ++r, out += chunk_.shape.state_floats(), high += kLanes) {
      const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(_mm512_loadu_si512(high), 8),
                                           _mm512_loadu_si512(high + kTileBytes / 4));
      const __m512 power = _mm512_set1_ps(-rows.power[r]);
      _mm512_storeu_ps(out, _mm512_scalef_ps(_mm512_cvtepi32_ps(sum), power));
    }
  }

  Chunk<uint16_t> chunk_;
  int64_t rows_;
  int64_t first_, last_;  // keys that any row sees
  int64_t depth_;         // head_dim, rounded up to whole products
  int32_t* sums_;         // [2 columns][2 planes][16][16 dimensions]
  uint8_t* high_;         // [16][kChunkTokens]
  uint8_t* low_;          // [16][kChunkTokens]
  float* key_scales_;     // [kChunkTokens]
  float* value_scales_;   // [kChunkTokens]; zero for tokens that no row sees
  int8_t* queries_;       // [16][depth_]
  int8_t* values_;        // [groups][head_dim / 16][16][16 dimensions][4 tokens]
  int8_t* keys_;          // [blocks][16][16 tokens][4 dimensions], if head_dim is below 64
  const int8_t* keys_of_[kChunkBlocks];  // in the KV buffer, or the copy
  ChunkFetch fetch_;
  int64_t fetches_;  // lines for each block's keys, and for its values
};

inline void attend_chunk_tiles(const AttentionShape& shape, const AttentionTile& tile, int64_t index,
                               const UpcomingChunk& next, const AttentionScratch& scratch,
                               float* states) {
  if (TileAttention(shape, tile, index, next, scratch).run(states)) return;
  // Rows of one query see the same keys, so none suffers from what another sees.
  AttentionTile query = tile;
  query.num_queries = 1;
  for (int64_t i = 0; i < tile.num_queries; ++i) {
    TileAttention(shape, query, index, {}, scratch).run(states);
    query.q += tile.q_stride;
    query.first_position += 1;
    states += shape.group * shape.state_floats();
  }
}

}  // namespace shoal::SHOAL_ISA_NAMESPACE

#endif
