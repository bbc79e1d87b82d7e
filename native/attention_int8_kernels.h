// Attention with keys and values of 8 bits: what AMX and AVX-512 have in common.
//
// Queries, keys and values are of 8 bits with a scale for each head of a token (kv_int8_kernels.h), the
// weights of a row of up to 14 bits with a common power of two, in two planes. Sums of products are exact, so the
// arithmetic of a row depends on that row and its own keys alone: a key that it doesn't see weighs exactly
// zero, and what is common to its keys, the largest score and the sum of the weights, is taken from those that
// it sees. Sums of the weights are of those before rounding, lane by lane (token mod 64, times the scales of
// values token mod 16). How products are computed changes no bit.
#pragma once

#include "attention_int8_weights.h"
#include "attention_kernels.h"
#include "kv_int8_kernels.h"

#if defined(__AVX512VNNI__)

namespace shoal::SHOAL_ISA_NAMESPACE {

inline constexpr int kTileQueries = 16;  // rows that are attended together, at most

// Fetches upcoming blocks, some lines of the cache at a time.
class BlockFetch {
 public:
  BlockFetch(const AttentionShape& shape, const UpcomingBlocks& upcoming)
      : run_(upcoming.runs[0]),
        last_(upcoming.runs[1]),
        block_halves_(shape.block_halves),
        head_halves_(kBlockSize * (shape.head_dim + 2)),
        place_(head_halves_) {}

  int64_t lines() const {
    return (run_.num_blocks + last_.num_blocks) * (head_halves_ / kLineHalves);
  }

  void fetch(int64_t lines) {
    for (; lines > 0; --lines, place_ += kLineHalves) {
      if (place_ == head_halves_) {
        if (run_.num_blocks == 0) {
          if (last_.num_blocks == 0) return;
          run_ = last_;
          last_.num_blocks = 0;
        }
        block_ = run_.kv + *run_.blocks++ * block_halves_;
        --run_.num_blocks;
        place_ = 0;
      }
      _mm_prefetch(reinterpret_cast<const char*>(block_ + place_), _MM_HINT_T1);
    }
  }

 private:
  static constexpr int64_t kLineHalves = 32;

  UpcomingBlocks::Run run_, last_;
  int64_t block_halves_, head_halves_;
  const uint16_t* block_ = nullptr;
  int64_t place_;
};

// One tile of queries and one chunk of keys. Products are left to those who derive from it.
class Int8Attention {
 protected:
  Int8Attention(const AttentionShape& shape, const AttentionTile& tile, int64_t index,
                const UpcomingBlocks& upcoming, const AttentionScratch& scratch)
      : chunk_{shape, tile, {}, index * kChunkTokens, 0, 0, scratch.scores},
        rows_(tile.num_queries * shape.group),
        first_(chunk_.first_key(0)),
        last_(chunk_.last_key(rows_ - 1)),
        high_(reinterpret_cast<uint8_t*>(scratch.scores + kTileQueries * kChunkTokens)),
        low_(high_ + kTileQueries * kChunkTokens),
        key_scales_(scratch.blocks),
        value_scales_(key_scales_ + kChunkTokens),
        fetch_(shape, upcoming) {
    chunk_.first_block = first_ / kLanes;
    chunk_.last_block = (last_ + kLanes - 1) / kLanes;
    const int64_t visits = 2 * (chunk_.last_block - chunk_.first_block);  // of keys and of values
    fetches_ = visits > 0 ? (fetch_.lines() + visits - 1) / visits : 0;
    for (int64_t b = chunk_.first_block; b < chunk_.last_block; ++b) {
      chunk_.blocks[b] = tile.kv + tile.block_table[index * kChunkBlocks + b] * shape.block_halves;
    }
  }

  // Calls attend() if there is anything to see. Returns whether the states are right: of rows that see a
  // value that is not finite, and rows that don't, only one kind can be done at a time.
  template <typename Attend>
  SHOAL_INLINE bool run(float* states, Attend&& attend) {
    if (first_ >= last_) {
      see_nothing(states);
      return true;
    }
    const bool values_are_finite = load_scales();
    if (!values_are_finite && chunk_.tile.num_queries > 1) return false;
    attend();
    if (values_are_finite) return true;
    for (int64_t row = 0; row < rows_; ++row) {
      states[row * chunk_.shape.state_floats() + 1] = __builtin_nanf("");
    }
    return true;
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
    uint64_t large[kTileQueries];  // the places of weights above 255
    float scale[kTileQueries];     // of the scores
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
    // One pass over all rows after the other: else each row would wait for its own maximum and sum.
    for (int64_t r = 0; r < rows.count; ++r) {
      const bool sees_any = rows.first[r] < rows.last[r];
      rows.maximum[r] = sees_any ? weight_row(r).score(rows.scale[r], shape.soft_cap) : kMasked;
    }
    for (int64_t r = 0; r < rows.count; ++r) {
      const float scale = is_capped ? 1.0f : rows.scale[r];
      const WeightRow::Sums sums = weight_row(r).weigh(rows.maximum[r], scale);
      rows.sum[r] = sums.weights;
      rows.power[r] = weight_power(sums.scaled);
      if (rows.first[r] < rows.last[r]) rows.maximum[r] *= scale;
    }
    for (int64_t r = 0; r < rows.count; ++r) {
      rows.large[r] = weight_row(r).round(rows.power[r], groups.begin, groups.end);
    }
  }

  void store_maxima_and_sums(const Rows& rows, float* states) const {
    for (int64_t r = 0; r < rows.count; ++r, states += chunk_.shape.state_floats()) {
      states[0] = rows.maximum[r];
      states[1] = rows.sum[r];
    }
  }

  Chunk<uint16_t> chunk_;
  int64_t rows_;
  int64_t first_, last_;  // keys that any row sees
  uint8_t* high_;         // [16][kChunkTokens]
  uint8_t* low_;          // [16][kChunkTokens]
  float* key_scales_;     // [kChunkTokens]
  float* value_scales_;   // [kChunkTokens]; zero for tokens that no row sees
  BlockFetch fetch_;
  int64_t fetches_;  // lines for each block's keys, and for its values

 private:
  void see_nothing(float* states) const {
    const int64_t size = chunk_.shape.state_floats();
    for (int64_t i = 0; i < rows_ * size; i += kLanes) Vec::zero().store(states + i);
    for (int64_t row = 0; row < rows_; ++row) states[row * size] = kMasked;
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
};

// Attention of a tile to a chunk by `Attention`, which derives from Int8Attention.
template <typename Attention>
inline void attend_chunk_int8(const AttentionShape& shape, const AttentionTile& tile, int64_t index,
                              const UpcomingBlocks& upcoming, const AttentionScratch& scratch,
                              float* states) {
  if (Attention(shape, tile, index, upcoming, scratch).run(states)) return;
  // Rows of one query see the same keys, so none suffers from what another sees.
  AttentionTile query = tile;
  query.num_queries = 1;
  for (int64_t i = 0; i < tile.num_queries; ++i) {
    Attention(shape, query, index, {}, scratch).run(states);
    query.q += tile.q_stride;
    query.first_position += 1;
    states += shape.group * shape.state_floats();
  }
}

}  // namespace shoal::SHOAL_ISA_NAMESPACE

#endif
