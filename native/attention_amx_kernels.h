// Attention on AMX bf16 tiles: up to 32 rows to one chunk of 256 keys at a time.
//
// Keys and values lie in the KV buffer as B operands of the tile unit (write_kv_tiles). Its arithmetic
// differs from that of attention_kernels.h, but a row's still depends on that row and its own keys
// alone: a product adds, in fp32, 32 terms at absolute places, dimensions for scores and keys for
// values. A key that a row doesn't see weighs exactly zero, and a product of zeros changes no
// accumulator, so it doesn't matter how far the other rows of a tile see. Weights are rounded to bf16,
// and the sum is of the rounded ones, by the tile unit: as if of values that are all one.
#pragma once

#include "attention_kernels.h"
#include "attention_tiles.h"

#if defined(__AMX_BF16__)

namespace shoal::SHOAL_ISA_NAMESPACE {

// 2^x for x <= 0, with a relative error of 7.5e-5 before rounding to bf16; 0 for -inf.
SHOAL_INLINE Vec exp2_of_negative(Vec x) {
  const Vec r = {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};  // x - floor(x)
  Vec p = fma(Vec::broadcast(0.078024523f), r, Vec::broadcast(0.22606716f));
  p = fma(p, r, Vec::broadcast(0.69583354f));
  p = fma(p, r, Vec::broadcast(0.99992522f));
  return {_mm512_scalef_ps(p.v, x.v)};  // p 2^floor(x)
}

// Scores and weights of one row and the keys [first, last) of the chunk that it sees.
struct ScoreRow {
  float* scores;      // [kChunkTokens]
  uint16_t* weights;  // [kChunkTokens]
  int64_t first, last;

  int64_t first_pair() const { return first / kDepth; }  // of blocks
  int64_t end_pair() const { return (last + kDepth - 1) / kDepth; }

  // Replaces what the row doesn't see, and what may never have been computed, in the pairs at the ends.
  void mask() const {
    mask_pair(first_pair());
    if (end_pair() > first_pair() + 1) mask_pair(end_pair() - 1);
  }
  void mask_pair(int64_t pair) const {
    const int64_t begin = pair * kDepth;
    const uint32_t above = first > begin ? ~0u << (first - begin) : ~0u;
    const uint32_t below = last < begin + kDepth ? ~(~0u << (last - begin)) : ~0u;
    const uint32_t seen = above & below;
    if (seen == ~0u) return;
    float* s = scores + begin;
    const __m512 masked = _mm512_set1_ps(kMasked);
    _mm512_storeu_ps(s, _mm512_mask_loadu_ps(masked, static_cast<__mmask16>(seen), s));
    _mm512_storeu_ps(s + kLanes,
                     _mm512_mask_loadu_ps(masked, static_cast<__mmask16>(seen >> 16), s + kLanes));
  }

  void cap(float scale, float soft_cap) const {
    for (int64_t i = first_pair() * kDepth; i < end_pair() * kDepth; i += kLanes) {
      cap_scores(Vec::load(scores + i) * Vec::broadcast(scale), soft_cap).store(scores + i);
    }
  }

  // The maximum, and zero, or NaN if any score is not finite.
  void summarize(float& maximum, float& poison) const {
    Vec highest[2] = {Vec::broadcast(kMasked), Vec::broadcast(kMasked)};
    Vec zeros[2] = {Vec::zero(), Vec::zero()};
    for (int64_t i = first_pair() * kDepth; i < end_pair() * kDepth; i += kDepth) {
      for (int half = 0; half < 2; ++half) {
        const Vec score = Vec::load(scores + i + half * kLanes);
        highest[half] = max(highest[half], score);
        zeros[half] = fma(score, Vec::zero(), zeros[half]);
      }
    }
    maximum = reduce_max(max(highest[0], highest[1]));
    const __m512 sum = (zeros[0] + zeros[1]).v;
    poison = _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q) == 0 ? 0.0f : __builtin_nanf("");
  }

  // Writes the weights exp((score - maximum) * scale) for the pairs [begin, end).
  void weigh(float maximum, float scale, int64_t begin, int64_t end) const {
    const float log2_scale = scale * 1.44269504f;
    const Vec factor = Vec::broadcast(log2_scale), offset = Vec::broadcast(-maximum * log2_scale);
    clear(begin, first_pair());
    for (int64_t i = first_pair() * kDepth; i < end_pair() * kDepth; i += kDepth) {
      const Vec low = fma(Vec::load(scores + i), factor, offset);
      const Vec high = fma(Vec::load(scores + i + kLanes), factor, offset);
      _mm512_storeu_si512(weights + i, to_bf16(exp2_of_negative(low), exp2_of_negative(high)));
    }
    clear(end_pair(), end);
  }

  void clear(int64_t begin, int64_t end) const {
    for (int64_t pair = begin; pair < end; ++pair) {
      _mm512_storeu_si512(weights + pair * kDepth, _mm512_setzero_si512());
    }
  }
};

// A B tile of ones.
struct alignas(64) OnesTile {
  uint16_t halves[kTileHalves];

  constexpr OnesTile() : halves{} {
    for (uint16_t& half : halves) half = 0x3f80;
  }
};
inline constexpr OnesTile kOnes;

// One tile of queries and one chunk of keys on the tile unit.
class TileAttention {
 public:
  TileAttention(const AttentionShape& shape, const AttentionTile& tile, int64_t index,
                const AttentionScratch& scratch)
      : chunk_{shape, tile, {}, index * kChunkTokens, 0, 0, scratch.scores},
        rows_(tile.num_queries * shape.group),
        first_(chunk_.first_key(0)),
        last_(chunk_.last_key(rows_ - 1)),
        depth_((shape.head_dim + kDepth - 1) / kDepth * kDepth),
        weights_(reinterpret_cast<uint16_t*>(scratch.scores + kTileQueries * kChunkTokens)),
        values_(reinterpret_cast<uint16_t*>(scratch.blocks)),
        keys_(values_ + kChunkTokens * shape.head_dim),
        queries_(keys_ + kChunkTokens * depth_) {
    chunk_.first_block = first_ / kLanes;
    chunk_.last_block = (last_ + kLanes - 1) / kLanes;
    for (int64_t b = chunk_.first_block; b < chunk_.last_block; ++b) {
      chunk_.blocks[b] = tile.kv + tile.block_table[index * kChunkBlocks + b] * shape.block_halves;
      keys_of_[b] = chunk_.blocks[b];
    }
  }

  // Whether the states are right: with a value that isn't finite those rows that don't see it, but share
  // a tile with a row that does, are not (0 * NaN is NaN).
  bool run(float* states) {
    if (!load() && chunk_.tile.num_queries > 1) return false;
    int64_t configured = 0;
    for (int64_t row = 0, rows; row < rows_; row += rows) {
      const int64_t left = rows_ - row;
      rows = left >= kMostRows ? kMostRows : left < kTileQueries ? left : kTileQueries;
      const int64_t tile_rows = rows < kTileQueries ? rows : kTileQueries;
      if (tile_rows != configured) TileConfig(tile_rows).load();
      configured = tile_rows;
      float* const row_states = states + row * chunk_.shape.state_floats();
      if (rows == kMostRows) {
        attend<2>(row, rows, row_states);
      } else {
        attend<1>(row, rows, row_states);
      }
    }
    _tile_release();
    return true;
  }

 private:
  static constexpr int64_t kMostRows = 2 * kTileQueries;
  static constexpr int64_t kWeightBytes = kChunkTokens * sizeof(uint16_t);

  struct Pairs {  // of blocks
    int64_t begin, end;
  };

  // Rows that are attended together: where they lie and what is known of their scores.
  struct Rows {
    int64_t count = 0;
    const float* q[kMostRows];
    int64_t first[kMostRows], last[kMostRows];  // keys seen, relative to the chunk
    float maximum[kMostRows], poison[kMostRows];
  };

  Rows rows_from(int64_t row, int64_t count) const {
    Rows rows;
    int64_t head = row % chunk_.shape.group;
    for (; rows.count < count; ++rows.count, ++row, ++head) {
      const bool same_query = rows.count > 0 && head < chunk_.shape.group;
      if (head == chunk_.shape.group) head = 0;
      const int64_t r = rows.count;
      rows.q[r] = same_query ? rows.q[r - 1] + chunk_.shape.head_dim : chunk_.query(row);
      rows.first[r] = same_query ? rows.first[r - 1] : chunk_.first_key(row);
      rows.last[r] = same_query ? rows.last[r - 1] : chunk_.last_key(row);
    }
    return rows;
  }

  // Scores are of 16 rows at a time, to stay in the L1 cache; values are read for 32 rows at once.
  template <int kRowTiles>
  void attend(int64_t row, int64_t count, float* states) {
    Rows rows = rows_from(row, count);
    const int64_t first_block = rows.first[0] / kLanes;
    const int64_t end_block = (rows.last[count - 1] + kLanes - 1) / kLanes;
    const Pairs pairs{first_block / 2, (end_block + 1) / 2};
    const int64_t tile_rows = count / kRowTiles;
    for (int64_t r = 0; r < count; r += tile_rows) {
      load_queries(rows, r, r + tile_rows);
      score(first_block, end_block);
      weigh(rows, r, r + tile_rows, pairs);
    }
    accumulate<kRowTiles>(pairs, states);
    for (int64_t r = 0; r < count; ++r, states += chunk_.shape.state_floats()) {
      states[0] = rows.maximum[r];
      states[1] += rows.poison[r];
    }
  }

  void load_queries(const Rows& rows, int64_t begin, int64_t end) {
    const int64_t whole = chunk_.shape.head_dim / kDepth * kDepth;
    uint16_t* out = queries_;
    for (int64_t r = begin; r < end; ++r, out += depth_) {
      const float* const q = rows.q[r];
      for (int64_t d = 0; d < whole; d += kDepth) {
        _mm512_storeu_si512(out + d, to_bf16(Vec::load(q + d), Vec::load(q + d + kLanes)));
      }
      if (whole < depth_) _mm512_storeu_si512(out + whole, to_bf16(Vec::load(q + whole), Vec::zero()));
    }
  }

  // Copies a block's keys, filled up with zeros to whole products: what follows them in the block are
  // values, and those not written yet may be NaN. Few rows read whole products in place; they wait for
  // memory, which is fastest where a block is read in order, so its keys are fetched before its values.
  void load_keys(int64_t block) {
    const int64_t halves = chunk_.shape.head_dim * kLanes, padded = depth_ * kLanes;
    const uint16_t* const from = chunk_.blocks[block];
    if (rows_ <= kTileQueries && halves == padded) {
      for (int64_t i = 0; i < halves; i += kDepth) {
        _mm_prefetch(reinterpret_cast<const char*>(from + i), _MM_HINT_T0);
      }
      return;
    }
    uint16_t* const to = keys_ + block * padded;
    int64_t i = 0;
    for (; i < halves; i += kDepth) _mm512_storeu_si512(to + i, _mm512_loadu_si512(from + i));
    for (; i < padded; i += kDepth) _mm512_storeu_si512(to + i, _mm512_setzero_si512());
    keys_of_[block] = to;
  }

  void score(int64_t first_block, int64_t end_block) {
    for_columns<1>(first_block, end_block, [&]<typename C>(int64_t block) {
      const uint16_t* const* k = keys_of_ + block;
      C::clear();
      for (int64_t d = 0; d < depth_; d += kDepth) {
        C::add(queries_ + d, 2 * depth_, [&](int i) { return k[i] + d * kLanes; });
      }
      C::store(chunk_.scores + block * kLanes, kChunkTokens * sizeof(float));
    });
  }

  // Turns the scores of the rows [begin, end) into weights for some pairs of blocks.
  void weigh(Rows& rows, int64_t begin, int64_t end, const Pairs& pairs) {
    const AttentionShape& shape = chunk_.shape;
    const bool capped = shape.soft_cap > 0.0f;
    const float scale = capped ? 1.0f : shape.scale;
    const auto score_row = [&](int64_t r) __attribute__((always_inline)) {
      return ScoreRow{chunk_.scores + (r - begin) * kChunkTokens, weights_ + r * kChunkTokens,
                      rows.first[r], rows.last[r]};
    };
    // All maxima first: else each row would wait for its own.
    for (int64_t r = begin; r < end; ++r) {
      const ScoreRow row = score_row(r);
      rows.maximum[r] = kMasked;
      rows.poison[r] = 0.0f;
      if (row.first >= row.last) continue;
      if (capped) row.cap(shape.scale, shape.soft_cap);
      row.mask();
      row.summarize(rows.maximum[r], rows.poison[r]);
    }
    for (int64_t r = begin; r < end; ++r) {
      const ScoreRow row = score_row(r);
      if (row.first >= row.last) {
        row.clear(pairs.begin, pairs.end);
      } else {
        row.weigh(rows.maximum[r], scale, pairs.begin, pairs.end);
        rows.maximum[r] *= scale;
      }
    }
  }

  // Loads keys, and copies the values of each two blocks into B tiles of full depth; those that no row
  // sees are zero, whatever lies there. Returns whether all values are finite.
  bool load() {
    __m512i largest = _mm512_setzero_si512();
    const int64_t pair_halves = kDepth * chunk_.shape.head_dim;
    for (int64_t block = chunk_.first_block / 2 * 2; block < chunk_.last_block; block += 2) {
      uint16_t* const pair = values_ + block / 2 * pair_halves;
      largest = _mm512_max_epu16(largest, load_block(block, pair));
      largest = _mm512_max_epu16(largest, load_block(block + 1, pair + kTileHalves / 2));
    }
    const __m512i infinity = _mm512_set1_epi16(static_cast<int16_t>(0x7f80 << 1));
    return _mm512_cmpge_epu16_mask(largest, infinity) == 0;
  }

  // Returns in each lane the largest magnitude of the values, as twice its bits.
  __m512i load_block(int64_t block, uint16_t* out) {
    const int64_t begin = block * kLanes, end = begin + kLanes;
    if (end <= first_ || last_ <= begin) return clear_values(out);
    load_keys(block);
    if (first_ <= begin && end <= last_) {
      return copy_values(chunk_.blocks[block], out, [](int) { return ~0u; });
    }
    return copy_values(chunk_.blocks[block], out, [&](int line) {
      const int64_t token = begin + 2 * line;
      const bool even = first_ <= token && token < last_;
      const bool odd = first_ <= token + 1 && token + 1 < last_;
      return (even ? 0x55555555u : 0u) | (odd ? 0xaaaaaaaau : 0u);
    });
  }

  __m512i clear_values(uint16_t* out) const {
    for (int64_t d = 0; d < chunk_.shape.head_dim; d += kLanes, out += kTileHalves) {
      for (int line = 0; line < 8; ++line) {
        _mm512_storeu_si512(out + line * kDepth, _mm512_setzero_si512());
      }
    }
    return _mm512_setzero_si512();
  }

  // Copies a block's lines of V; tokens(line) has the lanes that a row sees.
  template <typename Tokens>
  SHOAL_INLINE __m512i copy_values(const uint16_t* block, uint16_t* out, Tokens&& tokens) const {
    __m512i largest = _mm512_setzero_si512();
    const uint16_t* v = block + kLanes * chunk_.shape.head_dim;
    for (int64_t d = 0; d < chunk_.shape.head_dim; d += kLanes, out += kTileHalves) {
      for (int line = 0; line < 8; ++line, v += kDepth) {
        const __m512i x = _mm512_maskz_loadu_epi16(tokens(line), v);
        _mm512_storeu_si512(out + line * kDepth, x);
        largest = _mm512_max_epu16(largest, _mm512_add_epi16(x, x));
      }
    }
    return largest;
  }

  // Weights times ones, for the sums, then times values.
  template <int kRowTiles>
  void accumulate(const Pairs& pairs, float* states) {
    const AttentionShape& shape = chunk_.shape;
    for_columns<kRowTiles>(0, 1 + shape.head_dim / kLanes, [&]<typename C>(int64_t column) {
      C::clear();
      for (int64_t pair = pairs.begin; pair < pairs.end; ++pair) {
        const uint16_t* const v = values_ + pair * kDepth * shape.head_dim;
        C::add(weights_ + pair * kDepth, kWeightBytes, [&](int i) {
          return column + i == 0 ? kOnes.halves : v + (column + i - 1) * kTileHalves;
        });
      }
      C::store(states + column * kLanes, shape.state_floats() * sizeof(float));
    });
  }

  Chunk<uint16_t> chunk_;
  int64_t rows_;
  int64_t first_, last_;  // keys that any row sees
  int64_t depth_;         // head_dim, rounded up to whole products
  uint16_t* weights_;     // [32][kChunkTokens]
  uint16_t* values_;      // [pairs of blocks][head_dim / 16][16][16 dimensions][2 tokens]
  uint16_t* keys_;        // [blocks][depth_ / 2][16 tokens][2 dimensions]
  uint16_t* queries_;     // [16][depth_]
  const uint16_t* keys_of_[kChunkBlocks];  // where each block's keys are: in the KV buffer, or a copy
};

inline void attend_chunk_tiles(const AttentionShape& shape, const AttentionTile& tile, int64_t index,
                               const AttentionScratch& scratch, float* states) {
  if (TileAttention(shape, tile, index, scratch).run(states)) return;
  // Rows of one query see the same keys, so none suffers from what another sees.
  AttentionTile query = tile;
  query.num_queries = 1;
  for (int64_t i = 0; i < tile.num_queries; ++i) {
    TileAttention(shape, query, index, scratch).run(states);
    query.q += tile.q_stride;
    query.first_position += 1;
    states += shape.group * shape.state_floats();
  }
}

}  // namespace shoal::SHOAL_ISA_NAMESPACE

#endif
