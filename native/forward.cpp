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
// Rows that a thread takes through several stages: enough to be worth reading the weights for, few enough for
// the caches. Measured with two threads.
constexpr int64_t kLeastRowsOfAPart = 8;
constexpr int64_t kMostRowsOfAPart = 64;

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
      frames_(pool.size()),
      logits_stride_(row_stride(model.sizes().vocab_size)) {
  for (const int64_t columns : model.buffer_columns()) strides_.push_back(row_stride(columns));
  for (const AttentionHeads& heads : model.attention_heads()) {
    plans_.emplace_back(heads, model.sizes().kv, kernels, pool.size());
  }
}

void Forward::reserve_lasting(int64_t rows) {
  lasting_.resize(strides_.size());
  for (std::size_t i = 0; i < strides_.size(); ++i) {
    if (model_.is_lasting(i)) lasting_[i].reserve(rows * strides_[i]);
  }
}

void Forward::reserve(Frame& frame, int64_t rows) const {
  frame.buffers.resize(strides_.size());
  for (std::size_t i = 0; i < strides_.size(); ++i) {
    if (!model_.is_lasting(i)) frame.buffers[i].reserve(rows * strides_[i]);
  }
  for (const Linear& linear : model_.linears()) {
    frame.prepared.reserve(linear.prepared_bytes(rows));
    frame.next_prepared.reserve(linear.prepared_bytes(rows));
  }
}

void Forward::compute_rows(const Batch& batch) {
  const RowSet all{batch, nullptr, batch.num_rows()};
  reserve_lasting(std::max(all.count, kMaxLogitRows));
  // Not on AMX, where each part would unpack the weights again.
  const bool in_parts = !kernels_.tiles && all.count >= kLeastRowsOfAPart * pool_.size();
  if (in_parts) {
    for (Frame& frame : frames_) reserve(frame, kMostRowsOfAPart);
  } else {
    reserve(whole_, std::max(all.count, kMaxLogitRows));
  }
  for (AttentionPlan& plan : plans_) plan.prepare(batch.sequences);
  const auto is_attention = [](const Stage& stage) {
    return std::holds_alternative<AttentionOp>(stage);
  };
  const std::vector<Stage>& body = model_.body();
  for (auto begin = body.begin(); begin != body.end();) {
    const auto end = std::find_if(begin, body.end(), is_attention);
    if (in_parts) {
      run_in_parts(begin, end, all);
    } else {
      run_stages(begin, end, {all, 0, all.count, whole_, pool_});
    }
    if (end == body.end()) break;
    run_stage(*end, {all, 0, all.count, whole_, pool_});
    begin = end + 1;
  }
}

const float* Forward::compute_logits(const Batch& batch, const int32_t* rows, int64_t count) {
  logits_.reserve(count * logits_stride_);
  reserve(whole_, kMaxLogitRows);
  const RowSet selected{batch, rows, count};
  run_stages(model_.tail().begin(), model_.tail().end(), {selected, 0, count, whole_, pool_});
  return logits_.data();
}

// With many rows each thread takes some through all stages, so that what a stage writes is still in its
// caches when the next one reads it, and waits for nobody in between.
void Forward::run_in_parts(StageIterator begin, StageIterator end, const RowSet& set) {
  const int64_t rows_of_all = kMostRowsOfAPart * pool_.size();
  const int64_t parts = (set.count + rows_of_all - 1) / rows_of_all * pool_.size();
  pool_.parallel_parts(parts, [&](int64_t part, int thread) {
    const int64_t first = set.count * part / parts, next = set.count * (part + 1) / parts;
    run_stages(begin, end, {set, first, next, frames_[thread], alone_});
  });
}

void Forward::run_stages(StageIterator begin, StageIterator end, const Part& part) {
  for (auto stage = begin; stage != end; ++stage) run_stage(*stage, part);
}

void Forward::run_stage(const Stage& stage, const Part& part) {
  std::visit(
      Overloaded{
          [&](const std::vector<RowOp>& ops) { run_rows(ops, part); },
          [&](const LinearOp& op) {
            model_.linears()[op.linear].multiply(part.pool, linear_input(op.x, op.first_wide, part),
                                                 part.frame.prepared.data(), at(part, op.out, part.begin),
                                                 strides_[op.out.buffer]);
          },
          [&](const GatedLinearOp& op) {
            model_.linears()[op.linear].multiply_gated(
                part.pool, linear_input(op.x, op.first_wide, part), part.frame.prepared.data(),
                model_.linears()[op.next], part.frame.next_prepared.data());
            std::swap(part.frame.prepared, part.frame.next_prepared);
          },
          [&](const AttentionOp& op) {
            plans_[op.heads].run(part.pool, at(part, op.q, 0), strides_[op.q.buffer], kv_, op.layer,
                                 at(part, op.out, 0), strides_[op.out.buffer]);
          },
          [&](const LogitsOp& op) {
            model_.linears()[op.linear].multiply(
                part.pool, linear_input(op.x, kAllWide, part), part.frame.prepared.data(),
                logits_.data(), logits_stride_);
          },
      },
      stage);
}

void Forward::run_rows(const std::vector<RowOp>& ops, const Part& part) {
  const int64_t share = (part.rows() + 4 * part.pool.size() - 1) / (4 * part.pool.size());
  const int64_t rows_per_task = std::clamp(share, kMinRowsPerTask, kMaxRowsPerTask);
  const int64_t tasks = (part.rows() + rows_per_task - 1) / rows_per_task;
  part.pool.parallel_parts(tasks, [&](int64_t task, int) {
    const int64_t begin = part.begin + task * rows_per_task;
    const int64_t end = std::min(begin + rows_per_task, part.end);
    for (const RowOp& op : ops) {
      std::visit(
          [&](const auto& row_op) {
            for (int64_t row = begin; row < end; ++row) run_row(row_op, part, row);
          },
          op);
    }
  });
}

void Forward::run_row(const EmbedOp& op, const Part& part, int64_t row) {
  model_.linears()[op.linear].dequantize_row(part.set.batch.token_ids[row], at(part, op.out, row));
}

void Forward::run_row(const RmsNormOp& op, const Part& part, int64_t row) {
  kernels_.rms_norm(at(part, op.x, row), op.weight.data(), at(part, op.out, row), op.x.width, op.epsilon);
}

void Forward::run_row(const AddBiasOp& op, const Part& part, int64_t row) {
  kernels_.add(at(part, op.x, row), op.bias.data(), op.x.width);
}

void Forward::run_row(const RopeOp& op, const Part& part, int64_t row) {
  const int64_t position = part.set.batch.positions[row];
  kernels_.rope(at(part, op.x, row), model_.rope_cos(position), model_.rope_sin(position), op.shape);
}

void Forward::run_row(const WriteKvOp& op, const Part& part, int64_t row) {
  const KvLayout& layout = model_.sizes().kv;
  const int64_t slot = part.set.batch.kv_slots[row];
  uint16_t* block = kv_ + slot / kBlockSize * layout.block_halves();
  for (int64_t head = 0; head < layout.num_kv_heads; ++head) {
    kernels_.write_kv(at(part, op.k, row) + head * layout.head_dim,
                      at(part, op.v, row) + head * layout.head_dim,
                      block + layout.head_offset(op.layer, head), slot % kBlockSize,
                      layout.head_dim);
  }
  if (kernels_.prepare_queries) kernels_.prepare_queries(at(part, op.q, row), op.q.width, layout.head_dim);
}

void Forward::run_row(const GatedActivationOp& op, const Part& part, int64_t row) {
  kernels_.gated_silu(at(part, op.gate, row), at(part, op.up, row), at(part, op.out, row), op.out.width);
}

void Forward::run_row(const AddOp& op, const Part& part, int64_t row) {
  kernels_.add(at(part, op.x, row), at(part, op.y, row), op.x.width);
}

void Forward::run_row(const SelectRowsOp& op, const Part& part, int64_t row) {
  std::memcpy(at(part, op.out, row), at(part, op.x, part.set.rows[row]),
              static_cast<std::size_t>(op.x.width) * sizeof(float));
}

void Forward::run_row(const PrepareOp& op, const Part& part, int64_t row) {
  model_.linears()[op.linear].prepare(linear_input(op.x, op.first_wide, part), row - part.begin,
                                      row - part.begin + 1, part.frame.prepared.data());
}

}  // namespace shoal
