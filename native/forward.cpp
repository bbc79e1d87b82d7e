#include "forward.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace shoal {
namespace {

// Rows that a task of a row stage takes: enough to be worth handing out, few enough to balance and to
// stay in the first-level cache between ops.
constexpr int64_t kMinRowsPerTask = 4;
constexpr int64_t kMaxRowsPerTask = 16;

template <typename... Ts>
struct Overloaded : Ts... {
  using Ts::operator()...;
};

}  // namespace

Forward::Forward(const Model& model, const Kernels& kernels, ThreadPool& pool, uint16_t* kv)
    : model_(model),
      kernels_(kernels),
      pool_(pool),
      kv_(kv),
      buffers_(model.buffer_columns().size()),
      logits_stride_(row_stride(model.sizes().vocab_size)) {
  for (const int64_t columns : model.buffer_columns()) strides_.push_back(row_stride(columns));
  for (const AttentionHeads& heads : model.attention_heads()) {
    plans_.emplace_back(heads, model.sizes().kv, kernels, pool.size());
  }
}

void Forward::reserve(int64_t rows) {
  rows = std::max(rows, kMaxLogitRows);
  for (std::size_t i = 0; i < buffers_.size(); ++i) buffers_[i].reserve(rows * strides_[i]);
  for (const Linear& linear : model_.linears()) {
    prepared_.reserve(linear.prepared_bytes(rows));
    next_prepared_.reserve(linear.prepared_bytes(rows));
  }
}

void Forward::compute_rows(const Batch& batch) {
  reserve(batch.num_rows());
  for (AttentionPlan& plan : plans_) plan.prepare(batch.sequences);
  const RowSet all{batch, nullptr, batch.num_rows()};
  for (const Stage& stage : model_.body()) run_stage(stage, all);
}

const float* Forward::compute_logits(const Batch& batch, const int32_t* rows, int64_t count) {
  logits_.reserve(count * logits_stride_);
  const RowSet selected{batch, rows, count};
  for (const Stage& stage : model_.tail()) run_stage(stage, selected);
  return logits_.data();
}

void Forward::run_stage(const Stage& stage, const RowSet& set) {
  std::visit(
      Overloaded{
          [&](const std::vector<RowOp>& ops) { run_rows(ops, set); },
          [&](const LinearOp& op) {
            model_.linears()[op.linear].multiply(pool_, linear_input(op.x, op.precision, set),
                                                 prepared_.data(), at(op.out, 0),
                                                 strides_[op.out.buffer]);
          },
          [&](const GatedLinearOp& op) {
            model_.linears()[op.linear].multiply_gated(
                pool_, linear_input(op.x, Precision::kInt8, set), prepared_.data(),
                model_.linears()[op.next], next_prepared_.data());
            std::swap(prepared_, next_prepared_);
          },
          [&](const AttentionOp& op) {
            plans_[op.heads].run(pool_, at(op.q, 0), strides_[op.q.buffer], kv_, op.layer,
                                 at(op.out, 0), strides_[op.out.buffer]);
          },
          [&](const LogitsOp& op) {
            model_.linears()[op.linear].multiply(pool_,
                                                 linear_input(op.x, Precision::kInt12, set),
                                                 prepared_.data(), logits_.data(), logits_stride_);
          },
      },
      stage);
}

void Forward::run_rows(const std::vector<RowOp>& ops, const RowSet& set) {
  const int64_t share = (set.count + 4 * pool_.size() - 1) / (4 * pool_.size());
  const int64_t rows_per_task = std::clamp(share, kMinRowsPerTask, kMaxRowsPerTask);
  const int64_t tasks = (set.count + rows_per_task - 1) / rows_per_task;
  pool_.parallel_parts(tasks, [&](int64_t task, int) {
    const int64_t begin = task * rows_per_task;
    const int64_t end = std::min(begin + rows_per_task, set.count);
    for (const RowOp& op : ops) {
      std::visit(
          [&](const auto& row_op) {
            for (int64_t row = begin; row < end; ++row) run_row(row_op, set, row);
          },
          op);
    }
  });
}

void Forward::run_row(const EmbedOp& op, const RowSet& set, int64_t row) {
  model_.linears()[op.linear].dequantize_row(set.batch.token_ids[row], at(op.out, row));
}

void Forward::run_row(const RmsNormOp& op, const RowSet&, int64_t row) {
  kernels_.rms_norm(at(op.x, row), op.weight.data(), at(op.out, row), op.x.width, op.epsilon);
}

void Forward::run_row(const AddBiasOp& op, const RowSet&, int64_t row) {
  kernels_.add(at(op.x, row), op.bias.data(), op.x.width);
}

void Forward::run_row(const RopeOp& op, const RowSet& set, int64_t row) {
  const int64_t position = set.batch.positions[row];
  kernels_.rope(at(op.x, row), model_.rope_cos(position), model_.rope_sin(position), op.shape);
}

void Forward::run_row(const WriteKvOp& op, const RowSet& set, int64_t row) {
  const KvLayout& layout = model_.sizes().kv;
  const int64_t slot = set.batch.kv_slots[row];
  uint16_t* block = kv_ + slot / kBlockSize * layout.block_halves();
  for (int64_t head = 0; head < layout.num_kv_heads; ++head) {
    kernels_.write_kv(at(op.k, row) + head * layout.head_dim,
                      at(op.v, row) + head * layout.head_dim,
                      block + layout.head_offset(op.layer, head), slot % kBlockSize,
                      layout.head_dim);
  }
  if (kernels_.prepare_queries) kernels_.prepare_queries(at(op.q, row), op.q.width, layout.head_dim);
}

void Forward::run_row(const GatedActivationOp& op, const RowSet&, int64_t row) {
  kernels_.gated_silu(at(op.gate, row), at(op.up, row), at(op.out, row), op.out.width);
}

void Forward::run_row(const AddOp& op, const RowSet&, int64_t row) {
  kernels_.add(at(op.x, row), at(op.y, row), op.x.width);
}

void Forward::run_row(const SelectRowsOp& op, const RowSet& set, int64_t row) {
  std::memcpy(at(op.out, row), at(op.x, set.rows[row]),
              static_cast<std::size_t>(op.x.width) * sizeof(float));
}

void Forward::run_row(const PrepareOp& op, const RowSet& set, int64_t row) {
  model_.linears()[op.linear].prepare(linear_input(op.x, op.precision, set), row, row + 1,
                                      prepared_.data());
}

}  // namespace shoal
