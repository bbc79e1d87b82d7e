// Replays a model's program over a ragged batch.
#pragma once

#include <cstdint>
#include <vector>

#include "aligned_buffer.h"
#include "attention.h"
#include "model.h"
#include "thread_pool.h"

namespace shoal {

// The rows of a step, checked: row r is token `token_ids[r]` at `positions[r]` of its sequence, and its
// key and value go to `kv_slots[r]` = block * 16 + offset.
struct Batch {
  std::vector<int32_t> token_ids;
  std::vector<int32_t> positions;
  std::vector<int64_t> kv_slots;
  std::vector<Sequence> sequences;

  int64_t num_rows() const { return static_cast<int64_t>(token_ids.size()); }
};

class Forward {
 public:
  // `kv` is borrowed: blocks in the layout of kv_layout.h.
  Forward(const Model& model, const Kernels& kernels, ThreadPool& pool, uint16_t* kv);

  // Most rows of one call of `compute_logits`: bounds the memory of the logits.
  static constexpr int64_t kMaxLogitRows = 64;

  // Runs the program up to select_rows for all rows of the batch.
  void compute_rows(const Batch& batch);

  // Runs the rest for the given rows of the last `compute_rows`; returns logits [count][stride].
  const float* compute_logits(const Batch& batch, const int32_t* rows, int64_t count);
  int64_t logits_stride() const { return logits_stride_; }

 private:
  // The rows that a stage works on: rows[i] of the batch, or row i itself when null.
  struct RowSet {
    const Batch& batch;
    const int32_t* rows;
    int64_t count;
  };

  // Room for consecutive rows; buffers that last are elsewhere.
  struct Frame {
    std::vector<AlignedBuffer<float>> buffers;
    // The input of the next linear layer, and room for a layer to prepare that of the one after.
    AlignedBuffer<uint8_t> prepared, next_prepared;
  };

  // Consecutive rows of a set on their way through some stages: what doesn't last lies in `frame`, from its
  // beginning on.
  struct Part {
    const RowSet& set;
    int64_t begin, end;
    Frame& frame;
    ThreadPool& pool;

    int64_t rows() const { return end - begin; }
  };

  void reserve_lasting(int64_t rows);
  void reserve(Frame& frame, int64_t rows) const;
  float* at(const Part& part, const View& view, int64_t row) {
    const bool is_lasting = model_.is_lasting(view.buffer);
    AlignedBuffer<float>& buffer = (is_lasting ? lasting_ : part.frame.buffers)[view.buffer];
    return buffer.data() + (row - (is_lasting ? 0 : part.begin)) * strides_[view.buffer] + view.start;
  }
  using StageIterator = std::vector<Stage>::const_iterator;
  void run_in_parts(StageIterator begin, StageIterator end, const RowSet& set);
  void run_stages(StageIterator begin, StageIterator end, const Part& part);
  void run_stage(const Stage& stage, const Part& part);
  void run_rows(const std::vector<RowOp>& ops, const Part& part);
  void run_row(const EmbedOp& op, const Part& part, int64_t row);
  void run_row(const RmsNormOp& op, const Part& part, int64_t row);
  void run_row(const AddBiasOp& op, const Part& part, int64_t row);
  void run_row(const RopeOp& op, const Part& part, int64_t row);
  void run_row(const WriteKvOp& op, const Part& part, int64_t row);
  void run_row(const GatedActivationOp& op, const Part& part, int64_t row);
  void run_row(const AddOp& op, const Part& part, int64_t row);
  void run_row(const SelectRowsOp& op, const Part& part, int64_t row);
  void run_row(const PrepareOp& op, const Part& part, int64_t row);
  LinearInput linear_input(const View& x, int64_t first_wide, const Part& part) {
    return {at(part, x, part.begin), strides_[x.buffer], part.rows(), first_wide};
  }

  const Model& model_;
  const Kernels& kernels_;
  ThreadPool& pool_;
  ThreadPool alone_{1};  // whoever calls it
  uint16_t* kv_;
  std::vector<int64_t> strides_;
  std::vector<AlignedBuffer<float>> lasting_;  // of all rows
  Frame whole_;                // when all rows go through a stage together
  std::vector<Frame> frames_;  // one a thread, when each takes parts through several stages
  std::vector<AttentionPlan> plans_;  // one for each of the model's attention_heads
  AlignedBuffer<float> logits_;
  int64_t logits_stride_;
};

}  // namespace shoal
