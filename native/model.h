// A recorded program (src/shoal/model/program.py) with its weights, checked and split into stages.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "attention.h"
#include "kernels.h"
#include "kv_layout.h"
#include "linear.h"

namespace shoal {

// Columns [start, start + width) of a buffer's rows.
struct View {
  int64_t buffer;
  int64_t start;
  int64_t width;
};

// Row ops: a row of the output depends on that row of the inputs alone.
struct EmbedOp {
  View out;
  int64_t linear;
};
struct RmsNormOp {
  View x, out;
  std::vector<float> weight;
  float epsilon;
};
struct AddBiasOp {
  View x;
  std::vector<float> bias;
};
struct RopeOp {
  View x;
  RopeShape shape;
};
// Before attention: writes keys and values to their blocks, and prepares the queries.
struct WriteKvOp {
  View q, k, v;
  int64_t layer;
};
struct GatedActivationOp {
  View gate, up, out;
};
struct AddOp {
  View x, y;
};
struct SelectRowsOp {
  View x, out;
};
// Prepares x for the linear layer that follows.
struct PrepareOp {
  View x;
  int64_t linear;
  int64_t first_wide;
};
using RowOp = std::variant<EmbedOp, RmsNormOp, AddBiasOp, RopeOp, WriteKvOp, GatedActivationOp,
                           AddOp, SelectRowsOp, PrepareOp>;

struct LinearOp {
  View x, out;
  int64_t linear;
  int64_t first_wide;
};
// Prepares the input of the layer `next`: silu(gate) * up, both products of `linear`.
struct GatedLinearOp {
  View x;
  int64_t linear, next;
  int64_t first_wide;  // all or none, in both
};
struct AttentionOp {
  View q, out;
  int64_t layer;
  int64_t heads;  // index into Model::attention_heads
};
struct LogitsOp {
  View x;
  int64_t linear;
};

// Consecutive row ops run together, row tile by row tile, in one parallel loop.
using Stage =
    std::variant<std::vector<RowOp>, LinearOp, GatedLinearOp, AttentionOp, LogitsOp>;

struct ModelSizes {
  int64_t vocab_size;
  int64_t max_model_len;
  KvLayout kv;
};

class Model {
 public:
  // rope_cos, rope_sin: [max_model_len][rotary_dim / 2].
  Model(const ModelSizes& sizes, Isa isa, std::vector<float> rope_cos,
        std::vector<float> rope_sin);

  // Each returns the index by which ops refer to it.
  int64_t add_buffer(int64_t columns);
  int64_t add_linear(const WeightSource& source);

  // Each appends an op. Throws std::invalid_argument for a shape or an order that can't run.
  void embed(View out, int64_t linear);
  void rms_norm(View x, View out, std::vector<float> weight, float epsilon);
  void linear(View x, View out, int64_t linear, int64_t first_wide);
  // out = down (silu(gate x) * (up x)); both matrices must be quantised, and `gate_up`, as no other, must be gated.
  // x and out may overlap.
  void feed_forward(View x, View out, int64_t gate_up, int64_t down, int64_t first_wide);
  void add_bias(View x, std::vector<float> bias);
  void rope(View x, const RopeShape& shape);
  // Whatever was in q is lost.
  void attention(View q, View k, View v, View out, int64_t layer, const AttentionHeads& heads);
  void gated_activation(View gate, View up, View out);
  void add(View x, View y);
  void select_rows(View x, View out);
  void logits(View x, int64_t linear);

  // Throws std::invalid_argument unless the program ends with logits.
  void check_complete() const;

  const ModelSizes& sizes() const { return sizes_; }
  const std::vector<int64_t>& buffer_columns() const { return buffer_columns_; }
  const std::vector<Linear>& linears() const { return linears_; }
  const std::vector<AttentionHeads>& attention_heads() const { return attention_heads_; }
  // Whether attention or select_rows reads a buffer or writes it, or a stage beyond them may read what one
  // before has written. Rows of all others are over when the stages between two attentions are.
  bool is_lasting(int64_t buffer) const { return buffer_is_lasting_[buffer]; }
  // Stages over all rows of the batch, and those over the selected rows.
  const std::vector<Stage>& body() const { return body_; }
  const std::vector<Stage>& tail() const { return tail_; }
  const float* rope_cos(int64_t position) const { return rope_row(rope_cos_, position); }
  const float* rope_sin(int64_t position) const { return rope_row(rope_sin_, position); }

 private:
  // kSource: all rows, and select_rows reads them; the tail, which runs several times, must keep them.
  enum class Rows { kUnset, kAll, kSource, kSelected };

  const float* rope_row(const std::vector<float>& table, int64_t position) const {
    return table.data() + position * rotary_half_;
  }
  void check_view(const View& view, const char* what) const;
  void read(const View& view, const char* what);
  void write(const View& view, const char* what);
  const Linear& linear_at(int64_t index, bool gated = false) const;
  void append(RowOp op);
  void append_stage(Stage stage);

  ModelSizes sizes_;
  Isa isa_;
  int64_t rotary_half_;
  std::vector<float> rope_cos_, rope_sin_;
  std::vector<int64_t> buffer_columns_;
  std::vector<Rows> buffer_rows_;  // which rows the buffer holds at this point of the program
  std::vector<int64_t> buffer_section_;  // that of the last op that wrote it
  std::vector<bool> buffer_is_lasting_;
  int64_t section_ = 0;  // counts attentions and select_rows
  Arena weights_;
  std::vector<Linear> linears_;
  std::vector<AttentionHeads> attention_heads_;
  std::vector<Stage> body_, tail_;
  bool selected_ = false;
  bool complete_ = false;
};

}  // namespace shoal
