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

  void reserve(int64_t rows);
  float* at(const View& view, int64_t row) {
    return buffers_[view.buffer].data() + row * strides_[view.buffer] + view.start;
  }
  void run_stage(const Stage& stage, const RowSet& set);
  void run_rows(const std::vector<RowOp>& ops, const RowSet& set);
  void run_row(const EmbedOp& op, const RowSet& set, int64_t row);
  void run_row(const RmsNormOp& op, const RowSet& set, int64_t row);
  void run_row(const AddBiasOp& op, const RowSet& set, int64_t row);
  void run_row(const RopeOp& op, const RowSet& set, int64_t row);
  void run_row(const WriteKvOp& op, const RowSet& set, int64_t row);
  void run_row(const GatedActivationOp& op, const RowSet& set, int64_t row);
  void run_row(const AddOp& op, const RowSet& set, int64_t row);
  void run_row(const SelectRowsOp& op, const RowSet& set, int64_t row);
  void run_row(const PrepareOp& op, const RowSet& set, int64_t row);
  LinearInput linear_input(const View& x, Precision precision, const RowSet& set) {
    return {at(x, 0), strides_[x.buffer], set.count, precision};
  }

  const Model& model_;
  const Kernels& kernels_;
  ThreadPool& pool_;
  uint16_t* kv_;
  std::vector<int64_t> strides_;
  std::vector<AlignedBuffer<float>> buffers_;
  std::vector<AttentionPlan> plans_;  // one for each of the model's attention_heads
  // The input of the next linear layer, and room for a layer to prepare that of the one after.
  AlignedBuffer<uint8_t> prepared_, next_prepared_;
  AlignedBuffer<float> logits_;
  int64_t logits_stride_;
};

}  // namespace shoal
