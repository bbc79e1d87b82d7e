// Attention of a tile of query rows to one chunk of 256 keys, and the merge of chunks.
//
// The arithmetic of a row does not depend on its tile: scores are fused multiply-adds over the
// dimensions in ascending order; the weights exp(score - maximum of the chunk) are summed lane by
// lane (token mod 16) in ascending order, then over the fixed tree; values are accumulated token by
// token in ascending order; chunks are merged in ascending order (the online softmax of Milakov and
// Gimelshein, 2018). How many rows and blocks share a register tile changes nothing.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace shoal::SHOAL_ISA_NAMESPACE {

// Register tiles: rows x vectors of accumulators, sized to the vector registers.
#if defined(__AVX512F__)
inline constexpr int kTileRows = 6;
inline constexpr int kTileVecs = 4;
#else
inline constexpr int kTileRows = 3;
inline constexpr int kTileVecs = 2;
#endif
inline constexpr int kSmallTileRows = 3;

// Stands for a score that a row must not see: exp makes it weigh exactly nothing. Finite, so that the
// test for infinite scores passes it.
inline constexpr float kMasked = -3.0e38f;

SHOAL_INLINE Vec load_lanes(const uint16_t* p) { return Vec::load_half(p); }
SHOAL_INLINE Vec load_lanes(const float* p) { return Vec::load(p); }

// Everything that the passes over one chunk share. T is the storage type of the blocks.
template <typename T>
struct Chunk {
  const AttentionShape& shape;
  const AttentionTile& tile;
  const T* blocks[kChunkBlocks];  // K then V; valid from first_block to last_block
  int64_t start;                  // position of the chunk's first token
  int64_t first_block, last_block;
  float* scores;

  const float* query(int64_t row) const {
    return tile.q + row / shape.group * tile.q_stride + row % shape.group * shape.head_dim;
  }
  // The keys that a row sees are [first_key(row), last_key(row)), relative to the chunk.
  int64_t first_key(int64_t row) const {
    const int64_t key = shape.first_key(tile.first_position + row / shape.group) - start;
    return key > 0 ? key : 0;
  }
  int64_t last_key(int64_t row) const {
    const int64_t key = tile.first_position + row / shape.group + 1 - start;
    return key < kChunkTokens ? key : kChunkTokens;
  }
};

// A score that is not finite becomes NaN.
SHOAL_INLINE Vec cap_scores(Vec score, float cap) {
  // tanh(y) = 1 - 2 / (exp(2y) + 1)
  const Vec one = Vec::broadcast(1.0f), two = Vec::broadcast(2.0f);
  const Vec e = exp(two * (score / Vec::broadcast(cap)));
  return fma(score, Vec::zero(), Vec::broadcast(cap) * (one - two / (e + one)));
}

template <int kRows, int kBlocks, typename T>
inline void score_tile(const Chunk<T>& chunk, int64_t row, int64_t block) {
  const int64_t head_dim = chunk.shape.head_dim;
  const float* q[kRows];
  for (int r = 0; r < kRows; ++r) q[r] = chunk.query(row + r);
  const T* k[kBlocks];
  for (int b = 0; b < kBlocks; ++b) k[b] = chunk.blocks[block + b];

  Vec sum[kRows][kBlocks];
  for (int r = 0; r < kRows; ++r) {
    for (int b = 0; b < kBlocks; ++b) sum[r][b] = Vec::zero();
  }
  for (int64_t d = 0; d < head_dim; ++d) {
    Vec keys[kBlocks];
    for (int b = 0; b < kBlocks; ++b) keys[b] = load_lanes(k[b] + d * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec x = Vec::broadcast(q[r][d]);
      for (int b = 0; b < kBlocks; ++b) sum[r][b] = fma(x, keys[b], sum[r][b]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    float* out = chunk.scores + (row + r) * kChunkTokens + block * kLanes;
    for (int b = 0; b < kBlocks; ++b) {
      Vec score = sum[r][b] * Vec::broadcast(chunk.shape.scale);
      if (chunk.shape.soft_cap > 0.0f) score = cap_scores(score, chunk.shape.soft_cap);
      score.store(out + b * kLanes);
    }
  }
}

template <int kRows, typename T>
inline void score_rows(const Chunk<T>& chunk, int64_t row) {
  int64_t block = chunk.first_block;
  for (; block + kTileVecs <= chunk.last_block; block += kTileVecs) {
    score_tile<kRows, kTileVecs>(chunk, row, block);
  }
  for (; block < chunk.last_block; ++block) score_tile<kRows, 1>(chunk, row, block);
}

// Turns the scores of one row into weights; writes their maximum and sum to the state. A score that is
// not finite makes the sum NaN.
inline void weigh_row(float* scores, int64_t first, int64_t last, float* state) {
  const int64_t begin = first / kLanes * kLanes;
  const int64_t end = (last + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = begin; i < first; ++i) scores[i] = kMasked;
  for (int64_t i = last; i < end; ++i) scores[i] = kMasked;

  Vec highest = Vec::broadcast(kMasked);
  for (int64_t i = begin; i < end; i += kLanes) highest = max(highest, Vec::load(scores + i));
  const float maximum = reduce_max(highest);
  Vec sum = Vec::zero(), poison = Vec::zero();
  for (int64_t i = begin; i < end; i += kLanes) {
    const Vec score = Vec::load(scores + i);
    const Vec weight = exp(score - Vec::broadcast(maximum));
    weight.store(scores + i);
    sum += weight;
    poison = fma(score, Vec::zero(), poison);
  }
  state[0] = maximum;
  state[1] = reduce_add(sum) + reduce_add(poison);
}

// accumulators[row][column..] += weight * V over the tokens [first, last), for kRows rows.
template <int kRows, int kVecs, typename T>
inline void accumulate_tile(const Chunk<T>& chunk, int64_t row, int64_t column, int64_t first,
                            int64_t last, float* states) {
  const int64_t head_dim = chunk.shape.head_dim;
  const int64_t state_floats = chunk.shape.state_floats();
  float* out[kRows];
  const float* weights[kRows];
  Vec sum[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    out[r] = states + (row + r) * state_floats + kLanes + column;
    weights[r] = chunk.scores + (row + r) * kChunkTokens;
    for (int c = 0; c < kVecs; ++c) sum[r][c] = Vec::load(out[r] + c * kLanes);
  }
  for (int64_t token = first; token < last;) {
    const int64_t block = token / kLanes;
    const int64_t block_end = (block + 1) * kLanes < last ? (block + 1) * kLanes : last;
    const T* v = chunk.blocks[block] + kLanes * head_dim + column - block * kLanes * head_dim;
    for (; token < block_end; ++token) {
      Vec values[kVecs];
      for (int c = 0; c < kVecs; ++c) values[c] = load_lanes(v + token * head_dim + c * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const Vec weight = Vec::broadcast(weights[r][token]);
        for (int c = 0; c < kVecs; ++c) sum[r][c] = fma(weight, values[c], sum[r][c]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kVecs; ++c) sum[r][c].store(out[r] + c * kLanes);
  }
}

template <int kRows, typename T>
inline void accumulate_span(const Chunk<T>& chunk, int64_t row, int64_t first, int64_t last,
                            float* states) {
  if (first >= last) return;
  int64_t column = 0;
  for (; column + kTileVecs * kLanes <= chunk.shape.head_dim; column += kTileVecs * kLanes) {
    accumulate_tile<kRows, kTileVecs>(chunk, row, column, first, last, states);
  }
  for (; column < chunk.shape.head_dim; column += kLanes) {
    accumulate_tile<kRows, 1>(chunk, row, column, first, last, states);
  }
}

// Rows see different keys at the ends: what all see is done together, the rest row by row, so that a
// row never touches the value of a token that it must not see (0 * NaN is NaN).
template <int kRows, typename T>
inline void accumulate_rows(const Chunk<T>& chunk, int64_t row, float* states) {
  const int64_t first = chunk.first_key(row + kRows - 1);  // of the latest query
  const int64_t last = chunk.last_key(row);                // of the earliest
  if (kRows == 1) return accumulate_span<1>(chunk, row, first, last, states);
  if (first >= last) {
    for (int r = 0; r < kRows; ++r) accumulate_rows<1>(chunk, row + r, states);
    return;
  }
  for (int r = 0; r < kRows; ++r) {
    accumulate_span<1>(chunk, row + r, chunk.first_key(row + r), first, states);
  }
  accumulate_span<kRows>(chunk, row, first, last, states);
  for (int r = 0; r < kRows; ++r) {
    accumulate_span<1>(chunk, row + r, last, chunk.last_key(row + r), states);
  }
}

// Calls step(row) over all rows, as many at a time as the register tile takes: step.run<kRows>(row).
template <typename Step>
SHOAL_INLINE void for_row_tiles(int64_t rows, Step&& step) {
  int64_t row = 0;
  if constexpr (kTileRows > kSmallTileRows) {
    for (; row + kTileRows <= rows; row += kTileRows) step.template operator()<kTileRows>(row);
  }
  for (; row + kSmallTileRows <= rows; row += kSmallTileRows) {
    step.template operator()<kSmallTileRows>(row);
  }
  for (; row < rows; ++row) step.template operator()<1>(row);
}

template <typename T>
inline void attend_blocks(const Chunk<T>& chunk, float* states) {
  const int64_t rows = chunk.tile.num_queries * chunk.shape.group;
  for_row_tiles(rows, [&]<int kRows>(int64_t row) { score_rows<kRows>(chunk, row); });
  for (int64_t row = 0; row < rows; ++row) {
    float* state = states + row * chunk.shape.state_floats();
    for (int64_t d = 0; d < chunk.shape.head_dim; d += kLanes) Vec::zero().store(state + kLanes + d);
    const int64_t first = chunk.first_key(row), last = chunk.last_key(row);
    if (first < last) {
      weigh_row(chunk.scores + row * kChunkTokens, first, last, state);
    } else {
      state[0] = kMasked;
      state[1] = 0.0f;
    }
  }
  for_row_tiles(rows, [&]<int kRows>(int64_t row) { accumulate_rows<kRows>(chunk, row, states); });
}

inline void widen_block(const uint16_t* halves, float* out, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) Vec::load_half(halves + i).store(out + i);
}

inline void attend_chunk(const AttentionShape& shape, const AttentionTile& tile, int64_t index,
                         const UpcomingBlocks&, const AttentionScratch& scratch, float* states) {
  const int64_t rows = tile.num_queries * shape.group;
  Chunk<uint16_t> chunk{shape, tile, {}, index * kChunkTokens, 0, 0, scratch.scores};
  chunk.first_block = chunk.first_key(0) / kLanes;
  chunk.last_block = (chunk.last_key(rows - 1) + kLanes - 1) / kLanes;
  for (int64_t b = chunk.first_block; b < chunk.last_block; ++b) {
    chunk.blocks[b] = tile.kv + tile.block_table[index * kChunkBlocks + b] * shape.block_halves;
  }
  // Few rows convert halves on the fly, which costs no memory traffic; many rows convert once.
  if (rows <= kTileRows) return attend_blocks(chunk, states);
  Chunk<float> wide{shape, tile, {}, chunk.start, chunk.first_block, chunk.last_block,
                    scratch.scores};
  const int64_t block_floats = 2 * kLanes * shape.head_dim;
  for (int64_t b = chunk.first_block; b < chunk.last_block; ++b) {
    float* block = scratch.blocks + b * block_floats;
    widen_block(chunk.blocks[b], block, block_floats);
    wide.blocks[b] = block;
  }
  attend_blocks(wide, states);
}

// The maxima and sums of up to 16 states: a lane each.
struct StateLanes {
  float maximum[kLanes] = {};
  float sum[kLanes] = {};

  StateLanes(const float* states, int64_t rows, int64_t state_floats) {
    for (int64_t r = 0; r < rows; ++r) {
      maximum[r] = states[r * state_floats];
      sum[r] = states[r * state_floats + 1];
    }
  }
  bool sees_nothing(int64_t r) const { return maximum[r] == kMasked && sum[r] == 0.0f; }
};

// Up to 16 rows.
inline void merge_lanes(float* states, const float* later, int64_t rows, int64_t state_floats) {
  const StateLanes a(states, rows, state_floats), b(later, rows, state_floats);
  const Vec maximum = max(Vec::load(a.maximum), Vec::load(b.maximum));
  const Vec keep = exp(Vec::load(a.maximum) - maximum);
  const Vec take = exp(Vec::load(b.maximum) - maximum);
  float maxima[kLanes], sums[kLanes], keeps[kLanes], takes[kLanes];
  maximum.store(maxima);
  keep.store(keeps);
  take.store(takes);
  fma(Vec::load(b.sum), take, Vec::load(a.sum) * keep).store(sums);
  for (int64_t r = 0; r < rows; ++r, states += state_floats, later += state_floats) {
    if (b.sees_nothing(r)) continue;
    if (a.sees_nothing(r)) {
      for (int64_t i = 0; i < state_floats; i += kLanes) Vec::load(later + i).store(states + i);
      continue;
    }
    const Vec keep_row = Vec::broadcast(keeps[r]), take_row = Vec::broadcast(takes[r]);
    for (int64_t i = kLanes; i < state_floats; i += kLanes) {
      fma(Vec::load(later + i), take_row, Vec::load(states + i) * keep_row).store(states + i);
    }
    states[0] = maxima[r];
    states[1] = sums[r];
  }
}

inline void merge_states(float* states, const float* later, int64_t rows, int64_t head_dim) {
  const int64_t state_floats = kLanes + head_dim;
  for (int64_t row = 0; row < rows; row += kLanes) {
    const int64_t count = rows - row < kLanes ? rows - row : kLanes;
    merge_lanes(states + row * state_floats, later + row * state_floats, count, state_floats);
  }
}

inline void finish_state(const float* state, float* out, int64_t head_dim) {
  const Vec sum = Vec::broadcast(state[1]);
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    (Vec::load(state + kLanes + d) / sum).store(out + d);
  }
}

}  // namespace shoal::SHOAL_ISA_NAMESPACE
