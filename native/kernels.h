// The kernels of one instruction set: a table of functions.
//
// Each kernel handles one row or one tile; loops over rows and threads lie outside. Kernels are
// written once on Vec and compiled for each instruction set; the same input gives the same bits.
// What has code in this header is always inlined: the linker must never pick a copy that was compiled
// for one instruction set for all of them.
#pragma once

#include <cstdint>

#include "isa.h"
#include "kv_layout.h"
#include "linear_table.h"
#include "tile_table.h"

namespace shoal {

// Keys are split into chunks at absolute positions, for every query alike.
inline constexpr int kChunkTokens = 256;
inline constexpr int kChunkBlocks = kChunkTokens / kBlockSize;

struct RopeShape {
  int64_t num_heads;
  int64_t head_dim;
  int64_t rotary_dim;
  bool interleaved;
};

struct AttentionShape {
  int64_t head_dim;  // a multiple of 16, at most 256
  int64_t group;     // query heads of a KV head
  int64_t block_halves;
  int64_t window;  // 0: unlimited
  float scale;
  float soft_cap;  // 0: none

  // Floats of an attention state: the maximum, the sum, padding, then head_dim accumulators.
  SHOAL_ALWAYS_INLINE int64_t state_floats() const { return 16 + head_dim; }
  SHOAL_ALWAYS_INLINE int64_t first_key(int64_t position) const {
    return window > 0 && position >= window ? position - window + 1 : 0;
  }
};

// Consecutive queries of one sequence with the query heads of one KV head: num_queries * group rows,
// row = query * group + head.
struct AttentionTile {
  const float* q;  // first query, first head of the group
  int64_t q_stride;
  int64_t num_queries;
  int64_t first_position;
  const uint16_t* kv;  // block 0, this layer and KV head
  const int32_t* block_table;
};

// Blocks that the thread is likely to attend to soon; a kernel may fetch them meanwhile. They may belong to two
// tasks, or to none.
struct UpcomingBlocks {
  struct Run {
    const uint16_t* kv = nullptr;  // block 0, its layer and KV head
    const int32_t* blocks = nullptr;
    int64_t num_blocks = 0;
  };
  Run runs[2];
};

// Working memory of attend_chunk, 64-byte aligned. The kernels in int8 divide it in their own way.
struct AttentionScratch {
  float* scores;  // [rows][kChunkTokens], at least 32 rows
  float* blocks;  // [kChunkBlocks][2 * 16 * head_dim]: the chunk in fp32
};

struct LogitsSummary {
  float max;
  bool has_nan;
};

inline constexpr int kWeightBlock = 512;  // weights summed together by exp_weights

struct Kernels {
  const LinearKernels* linear;
  const TileKernels* tiles;  // AMX alone; null otherwise
  KvType kv_type;            // of attention's keys and values

  // out = x / sqrt(mean(x^2) + epsilon) * weight over n columns.
  void (*rms_norm)(const float* x, const float* weight, float* out, int64_t n, float epsilon);
  // Rotates the heads of one row in place; cos, sin: [rotary_dim / 2].
  void (*rope)(float* x, const float* cos, const float* sin, const RopeShape& shape);
  // out = gate / (1 + exp(-gate)) * up over n columns.
  void (*gated_silu)(const float* gate, const float* up, float* out, int64_t n);
  // x += y over n columns.
  void (*add)(float* x, const float* y, int64_t n);
  // Stores k and v (head_dim floats) at `offset` (0 to 15) of a block's K and V (kv_layout.h).
  void (*write_kv)(const float* k, const float* v, uint16_t* block, int64_t offset,
                   int64_t head_dim);

  // Turns one row's query heads into what attend_chunk takes, in place; null if they are that already.
  void (*prepare_queries)(float* q, int64_t n, int64_t head_dim);

  // Attends the tile's rows to the keys of one chunk that each may see; writes a state for each row.
  void (*attend_chunk)(const AttentionShape& shape, const AttentionTile& tile, int64_t chunk,
                       const UpcomingBlocks& upcoming, const AttentionScratch& scratch, float* states);
  // Merges the states of a later chunk into `states`, row by row.
  void (*merge_states)(float* states, const float* later, int64_t rows, int64_t head_dim);
  // out = accumulators / sum of one state.
  void (*finish_state)(const float* state, float* out, int64_t head_dim);

  LogitsSummary (*summarize)(const float* logits, int64_t n);
  // The `count` largest, best first, ties by the lower index; count <= n, no NaN.
  void (*top_n)(const float* logits, int64_t n, int64_t count, int32_t* ids, float* values);
  // weights[i] = exp((logits[i] - max) * inverse_temperature), and for each kWeightBlock of them
  // their sum. `weights` may be null.
  void (*exp_weights)(const float* logits, int64_t n, float max, float inverse_temperature,
                      float* weights, double* block_sums);
  // The indices with logits[i] >= threshold, ascending; returns how many.
  int64_t (*collect)(const float* logits, int64_t n, float threshold, int32_t* ids);
};

const Kernels& kernels_for(Isa isa);

}  // namespace shoal
