#include "attention.h"

#include <algorithm>

namespace shoal {
namespace {

// Rows (queries x heads of a group) that share a converted chunk. With more, the conversion weighs
// less, but fewer tasks are left to balance; at 96 it takes about 6 % of the time.
constexpr int64_t kRowsPerTile = 96;
// A task above this part of a thread's share is divided by chunks.
constexpr int64_t kTasksPerThread = 4;
constexpr int64_t kConversionRows = 4;  // converting a chunk costs as much as this many rows

}  // namespace

int64_t AttentionPlan::Task::cost(int64_t group) const {
  return (num_queries * group + kConversionRows) * (end_chunk - first_chunk);
}

AttentionPlan::AttentionPlan(const AttentionHeads& heads, const KvLayout& layout,
                             const Kernels& kernels, int num_threads)
    : heads_(heads),
      layout_(layout),
      shape_{.head_dim = heads.head_dim,
             .group = heads.num_heads / heads.num_kv_heads,
             .block_halves = layout.block_halves(),
             .window = heads.window,
             .scale = heads.scale,
             .soft_cap = heads.soft_cap},
      kernels_(kernels),
      num_threads_(num_threads),
      queries_per_tile_(std::max<int64_t>(1, kRowsPerTile / shape_.group)),
      scratch_(num_threads) {
  const int64_t rows = queries_per_tile_ * shape_.group;
  for (AlignedBuffer<float>& scratch : scratch_) {
    scratch.reserve(rows * kChunkTokens + 2 * kChunkTokens * heads.head_dim +
                    2 * rows * shape_.state_floats());
  }
}

void AttentionPlan::prepare(const std::vector<Sequence>& sequences) {
  tasks_.clear();
  for (const Sequence& sequence : sequences) add_tasks(sequence);
  divide_large_tasks();
  std::stable_sort(tasks_.begin(), tasks_.end(), [this](const Task& a, const Task& b) {
    return a.cost(shape_.group) > b.cost(shape_.group);
  });
}

void AttentionPlan::add_tasks(const Sequence& sequence) {
  for (int64_t query = sequence.query_start; query < sequence.query_end;
       query += queries_per_tile_) {
    const int64_t count = std::min(queries_per_tile_, sequence.query_end - query);
    const int64_t position = sequence.first_position + (query - sequence.query_start);
    for (int64_t head = 0; head < heads_.num_kv_heads; ++head) {
      tasks_.push_back({.sequence = &sequence,
                        .kv_head = head,
                        .first_query = query,
                        .num_queries = count,
                        .first_chunk = shape_.first_key(position) / kChunkTokens,
                        .end_chunk = (position + count - 1) / kChunkTokens + 1,
                        .partial = -1});
    }
  }
}

void AttentionPlan::divide_large_tasks() {
  int64_t total = 0;
  for (const Task& task : tasks_) total += task.cost(shape_.group);
  const int64_t limit = total / (kTasksPerThread * num_threads_);
  divided_.clear();
  num_partials_ = 0;
  if (num_threads_ == 1) return;
  std::vector<Task> kept;
  for (Task& task : tasks_) {
    if (task.cost(shape_.group) <= limit || task.end_chunk - task.first_chunk == 1) {
      kept.push_back(task);
      continue;
    }
    task.partial = num_partials_;
    divided_.push_back(task);
    for (int64_t chunk = task.first_chunk; chunk < task.end_chunk; ++chunk) {
      Task part = task;
      part.first_chunk = chunk;
      part.end_chunk = chunk + 1;
      part.partial = num_partials_++;
      kept.push_back(part);
    }
  }
  tasks_.swap(kept);
  partials_.reserve(num_partials_ * queries_per_tile_ * shape_.group * shape_.state_floats());
}

AttentionTile AttentionPlan::tile(const Task& task, const float* q, int64_t q_stride,
                                  const uint16_t* kv, int64_t layer) const {
  const Sequence& sequence = *task.sequence;
  return {.q = q + task.first_query * q_stride + task.kv_head * shape_.group * shape_.head_dim,
          .q_stride = q_stride,
          .num_queries = task.num_queries,
          .first_position = sequence.first_position + (task.first_query - sequence.query_start),
          .kv = kv + layout_.head_offset(layer, task.kv_head),
          .block_table = sequence.block_table};
}

AttentionPlan::Blocks AttentionPlan::blocks_of(const Task& task) const {
  const int64_t position =
      task.sequence->first_position + (task.first_query - task.sequence->query_start);
  return {std::max(shape_.first_key(position) / kBlockSize, task.first_chunk * kChunkBlocks),
          std::min((position + task.num_queries - 1) / kBlockSize + 1, task.end_chunk * kChunkBlocks)};
}

UpcomingBlocks AttentionPlan::after(int64_t task_index, int64_t chunk, const uint16_t* kv,
                                    int64_t layer) const {
  const auto num_tasks = static_cast<int64_t>(tasks_.size());
  Blocks blocks = blocks_of(tasks_[task_index]);
  const int64_t first = std::max(blocks.begin, chunk * kChunkBlocks);
  int64_t missing = std::min(blocks.end, (chunk + 1) * kChunkBlocks) - first;
  blocks.begin = first + kChunkBlocks;
  UpcomingBlocks upcoming;
  for (auto& run : upcoming.runs) {
    while (blocks.begin >= blocks.end) {  // on to what is left of the way in the thread's next task
      task_index += num_threads_;
      if (task_index >= num_tasks) return upcoming;
      const int64_t beyond = blocks.begin - blocks.end;
      blocks = blocks_of(tasks_[task_index]);
      blocks.begin += beyond;
    }
    const Task& task = tasks_[task_index];
    const int64_t count = std::min(missing, blocks.end - blocks.begin);
    run = {kv + layout_.head_offset(layer, task.kv_head), task.sequence->block_table + blocks.begin,
           count};
    missing -= count;
    blocks.begin += count;
    if (missing == 0) break;
  }
  return upcoming;
}

void AttentionPlan::finish(const Task& task, const float* states, float* out,
                           int64_t out_stride) const {
  const int64_t group = shape_.group, head_dim = shape_.head_dim;
  for (int64_t row = 0; row < task.num_queries * group; ++row) {
    float* to = out + (task.first_query + row / group) * out_stride +
                (task.kv_head * group + row % group) * head_dim;
    kernels_.finish_state(states + row * shape_.state_floats(), to, head_dim);
  }
}

void AttentionPlan::run(ThreadPool& pool, const float* q, int64_t q_stride, const uint16_t* kv,
                        int64_t layer, float* out, int64_t out_stride) {
  const int64_t tile_rows = queries_per_tile_ * shape_.group;
  const int64_t tile_states = tile_rows * shape_.state_floats();
  pool.parallel_for(static_cast<int64_t>(tasks_.size()), [&](int64_t index, int thread) {
    const Task& task = tasks_[index];
    const AttentionTile queries = tile(task, q, q_stride, kv, layer);
    float* const scores = scratch_[thread].data();
    float* const blocks = scores + tile_rows * kChunkTokens;
    float* const states = blocks + 2 * kChunkTokens * shape_.head_dim;
    const AttentionScratch scratch{scores, blocks};
    const auto attend = [&](int64_t chunk, float* to) {
      kernels_.attend_chunk(shape_, queries, chunk, after(index, chunk, kv, layer), scratch, to);
    };
    if (task.partial >= 0) {
      attend(task.first_chunk, partials_.data() + task.partial * tile_states);
      return;
    }
    attend(task.first_chunk, states);
    for (int64_t chunk = task.first_chunk + 1; chunk < task.end_chunk; ++chunk) {
      attend(chunk, states + tile_states);
      kernels_.merge_states(states, states + tile_states, task.num_queries * shape_.group,
                            shape_.head_dim);
    }
    finish(task, states, out, out_stride);
  });
  pool.parallel_for(static_cast<int64_t>(divided_.size()), [&](int64_t index, int) {
    const Task& task = divided_[index];
    float* const states = partials_.data() + task.partial * tile_states;
    for (int64_t chunk = 1; chunk < task.end_chunk - task.first_chunk; ++chunk) {
      kernels_.merge_states(states, states + chunk * tile_states, task.num_queries * shape_.group,
                            shape_.head_dim);
    }
    finish(task, states, out, out_stride);
  });
}

}  // namespace shoal
