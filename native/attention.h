// Attention over the KV blocks for a ragged batch: plans the work of a step and runs it.
#pragma once

#include <cstdint>
#include <vector>

#include "aligned_buffer.h"
#include "kernels.h"
#include "kv_layout.h"
#include "thread_pool.h"

namespace shoal {

// The rows [query_start, query_end) of a batch are consecutive tokens of one sequence.
struct Sequence {
  int64_t query_start;
  int64_t query_end;
  int64_t first_position;      // of row query_start
  const int32_t* block_table;  // blocks up to the last row's position
};

// The sizes of an attention op that the plan depends on.
struct AttentionHeads {
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t window;  // 0: unlimited
  float scale;
  float soft_cap;  // 0: none

  bool operator==(const AttentionHeads&) const = default;
};

// One attention op over a batch. The arithmetic of a row is fixed (attention_kernels.h); the plan only
// divides it: a task is a tile of queries of one sequence and KV head, and a task that is a large part
// of all the work is divided again, by chunks of keys.
class AttentionPlan {
 public:
  AttentionPlan(const AttentionHeads& heads, const KvLayout& layout, const Kernels& kernels,
                int num_threads);

  // Divides the work of a step among the threads.
  void prepare(const std::vector<Sequence>& sequences);

  // q and out: a row each q_stride and out_stride floats, [num_heads * head_dim].
  void run(ThreadPool& pool, const float* q, int64_t q_stride, const uint16_t* kv, int64_t layer,
           float* out, int64_t out_stride);

 private:
  struct Task {
    const Sequence* sequence;
    int64_t kv_head;
    int64_t first_query, num_queries;  // rows of the batch
    int64_t first_chunk, end_chunk;
    int64_t partial;  // place of the first chunk's states among the partial ones; -1: not divided

    int64_t cost(int64_t group) const;
  };

  void add_tasks(const Sequence& sequence);
  void divide_large_tasks();
  AttentionTile tile(const Task& task, const float* q, int64_t q_stride, const uint16_t* kv,
                     int64_t layer) const;
  struct Blocks {  // of the task's sequence
    int64_t begin, end;
  };
  Blocks blocks_of(const Task& task) const;
  // For each block of a task's chunk the one that the same thread reads kChunkBlocks later, if tasks take about the
  // same time: always as much ahead, however short the last chunk of a task is.
  UpcomingBlocks after(int64_t task_index, int64_t chunk, const uint16_t* kv, int64_t layer) const;
  void finish(const Task& task, const float* states, float* out, int64_t out_stride) const;

  AttentionHeads heads_;
  KvLayout layout_;
  AttentionShape shape_;
  const Kernels& kernels_;
  int num_threads_;
  int64_t queries_per_tile_;
  std::vector<Task> tasks_;    // what the threads run
  std::vector<Task> divided_;  // tasks whose chunks are tasks of their own
  int64_t num_partials_ = 0;   // states of one tile and chunk
  AlignedBuffer<float> partials_;
  std::vector<AlignedBuffer<float>> scratch_;  // one a thread
};

}  // namespace shoal
