#include "model.h"

#include <algorithm>
#include <stdexcept>

namespace shoal {
namespace {

constexpr int64_t kMaxHeadDim = 256;

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

std::string number(int64_t value) { return std::to_string(value); }

void require_width(const View& view, int64_t width, const char* what) {
  require(view.width == width,
          std::string(what) + " has " + number(view.width) + " columns, expected " + number(width));
}

}  // namespace

Model::Model(const ModelSizes& sizes, Isa isa, std::vector<float> rope_cos,
             std::vector<float> rope_sin)
    : sizes_(sizes), isa_(isa), rope_cos_(std::move(rope_cos)), rope_sin_(std::move(rope_sin)) {
  const KvLayout& kv = sizes.kv;
  require(sizes.vocab_size > 0 && sizes.max_model_len > 0 && kv.num_layers > 0 &&
              kv.num_kv_heads > 0,
          "the sizes of a model must be positive");
  require(kv.head_dim > 0 && kv.head_dim % 16 == 0 && kv.head_dim <= kMaxHeadDim,
          "head_dim must be a multiple of 16 up to 256, got " + number(kv.head_dim));
  const auto entries = static_cast<int64_t>(rope_cos_.size());
  require(rope_sin_.size() == rope_cos_.size() && entries % sizes.max_model_len == 0,
          "the rope tables must have a row for each of " + number(sizes.max_model_len) +
              " positions");
  rotary_half_ = entries / sizes.max_model_len;
}

int64_t Model::add_buffer(int64_t columns) {
  require(columns > 0, "a buffer needs columns, got " + number(columns));
  buffer_columns_.push_back(columns);
  buffer_rows_.push_back(Rows::kUnset);
  buffer_section_.push_back(0);
  buffer_is_lasting_.push_back(false);
  return static_cast<int64_t>(buffer_columns_.size()) - 1;
}

int64_t Model::add_linear(const WeightSource& source) {
  linears_.emplace_back(source, isa_, weights_);
  return static_cast<int64_t>(linears_.size()) - 1;
}

void Model::check_view(const View& view, const char* what) const {
  const auto buffers = static_cast<int64_t>(buffer_columns_.size());
  require(view.buffer >= 0 && view.buffer < buffers,
          std::string(what) + " names buffer " + number(view.buffer) + " of " + number(buffers));
  const int64_t columns = buffer_columns_[view.buffer];
  require(view.start >= 0 && view.width > 0 && view.start <= columns - view.width,
          std::string(what) + " is columns " + number(view.start) + " to " +
              number(view.start + view.width) + " of a buffer of " + number(columns));
}

void Model::read(const View& view, const char* what) {
  check_view(view, what);
  require(buffer_rows_[view.buffer] == (selected_ ? Rows::kSelected : Rows::kAll),
          std::string(what) + " is read before it is written, or across select_rows");
  if (buffer_section_[view.buffer] != section_) buffer_is_lasting_[view.buffer] = true;
}

void Model::write(const View& view, const char* what) {
  check_view(view, what);
  require(!complete_, "logits must be the last op");
  require(buffer_rows_[view.buffer] != Rows::kSource,
          std::string(what) + " overwrites what select_rows reads");
  const bool is_part = view.width < buffer_columns_[view.buffer];
  const bool is_known = buffer_rows_[view.buffer] != Rows::kUnset;
  if (is_part && is_known && buffer_section_[view.buffer] != section_) {
    buffer_is_lasting_[view.buffer] = true;  // its other columns may still be read
  }
  buffer_rows_[view.buffer] = selected_ ? Rows::kSelected : Rows::kAll;
  buffer_section_[view.buffer] = section_;
}

const Linear& Model::linear_at(int64_t index, bool gated) const {
  const auto count = static_cast<int64_t>(linears_.size());
  require(index >= 0 && index < count,
          "linear " + number(index) + " of " + number(count) + " does not exist");
  require(linears_[index].is_gated() == gated,
          "linear " + number(index) +
              (gated ? " is not gated" : " is gated, which is for the first layer of feed_forward"));
  return linears_[index];
}

void Model::append_stage(Stage stage) { (selected_ ? tail_ : body_).push_back(std::move(stage)); }

void Model::append(RowOp op) {
  std::vector<Stage>& stages = selected_ ? tail_ : body_;
  if (stages.empty() || !std::holds_alternative<std::vector<RowOp>>(stages.back())) {
    stages.emplace_back(std::vector<RowOp>{});
  }
  std::get<std::vector<RowOp>>(stages.back()).push_back(std::move(op));
}

void Model::embed(View out, int64_t linear) {
  require(!selected_, "embed must come before select_rows");
  require_width(out, linear_at(linear).inputs(), "the output of embed");
  require(linear_at(linear).outputs() == sizes_.vocab_size,
          "embed needs a row for each token of the vocabulary");
  write(out, "the output of embed");
  append(EmbedOp{out, linear});
}

void Model::rms_norm(View x, View out, std::vector<float> weight, float epsilon) {
  require_width(out, x.width, "the output of rms_norm");
  require_width(x, static_cast<int64_t>(weight.size()), "the input of rms_norm");
  read(x, "the input of rms_norm");
  write(out, "the output of rms_norm");
  append(RmsNormOp{x, out, std::move(weight), epsilon});
}

void Model::linear(View x, View out, int64_t linear, int64_t first_wide) {
  require_width(x, linear_at(linear).inputs(), "the input of linear");
  require_width(out, linear_at(linear).outputs(), "the output of linear");
  require(x.buffer != out.buffer, "linear can't work in place");
  read(x, "the input of linear");
  write(out, "the output of linear");
  append(PrepareOp{x, linear, first_wide});
  append_stage(LinearOp{x, out, linear, first_wide});
}

void Model::feed_forward(View x, View out, int64_t gate_up, int64_t down, int64_t first_wide) {
  const Linear& first = linear_at(gate_up, true);
  const Linear& second = linear_at(down);
  require_width(x, first.inputs(), "the input of feed_forward");
  require_width(out, second.outputs(), "the output of feed_forward");
  require(first.outputs() == 2 * second.inputs(),
          "the gates of feed_forward must be as many as the inputs of its second layer");
  require(second.prepared_bytes(1) > 0, "the second layer of feed_forward must be quantised");
  read(x, "the input of feed_forward");
  write(out, "the output of feed_forward");
  append(PrepareOp{x, gate_up, first_wide});
  append_stage(GatedLinearOp{x, gate_up, down, first_wide});
  append_stage(LinearOp{x, out, down, first_wide});
}

void Model::add_bias(View x, std::vector<float> bias) {
  require_width(x, static_cast<int64_t>(bias.size()), "the input of add_bias");
  read(x, "the input of add_bias");
  append(AddBiasOp{x, std::move(bias)});
}

void Model::rope(View x, const RopeShape& shape) {
  require(!selected_, "rope must come before select_rows");
  require(shape.num_heads > 0 && shape.head_dim > 0, "rope needs heads");
  require_width(x, shape.num_heads * shape.head_dim, "the input of rope");
  require(shape.rotary_dim == 2 * rotary_half_ && shape.rotary_dim <= shape.head_dim,
          "rotary_dim must be " + number(2 * rotary_half_) + " as in the tables, got " +
              number(shape.rotary_dim));
  read(x, "the input of rope");
  append(RopeOp{x, shape});
}

void Model::attention(View q, View k, View v, View out, int64_t layer,
                      const AttentionHeads& heads) {
  const KvLayout& kv = sizes_.kv;
  require(!selected_, "attention must come before select_rows");
  require(layer >= 0 && layer < kv.num_layers,
          "attention names layer " + number(layer) + " of " + number(kv.num_layers));
  require(heads.num_kv_heads == kv.num_kv_heads && heads.head_dim == kv.head_dim,
          "attention must have the KV heads of the cache");
  require(heads.num_heads > 0 && heads.num_heads % heads.num_kv_heads == 0,
          number(heads.num_heads) + " heads can't share " + number(heads.num_kv_heads) +
              " KV heads evenly");
  require(heads.window >= 0, "the window of attention must not be negative");
  require_width(q, heads.num_heads * heads.head_dim, "q of attention");
  require_width(k, heads.num_kv_heads * heads.head_dim, "k of attention");
  require_width(v, heads.num_kv_heads * heads.head_dim, "v of attention");
  require_width(out, q.width, "the output of attention");
  require(q.buffer != out.buffer, "attention can't work in place");
  read(q, "q of attention");
  read(k, "k of attention");
  read(v, "v of attention");
  write(out, "the output of attention");
  append(WriteKvOp{q, k, v, layer});
  auto known = std::find(attention_heads_.begin(), attention_heads_.end(), heads);
  if (known == attention_heads_.end()) known = attention_heads_.insert(known, heads);
  append_stage(AttentionOp{q, out, layer, known - attention_heads_.begin()});
  buffer_is_lasting_[q.buffer] = buffer_is_lasting_[out.buffer] = true;
  ++section_;
}

void Model::gated_activation(View gate, View up, View out) {
  require_width(up, gate.width, "up of gated_activation");
  require_width(out, gate.width, "the output of gated_activation");
  read(gate, "gate of gated_activation");
  read(up, "up of gated_activation");
  write(out, "the output of gated_activation");
  append(GatedActivationOp{gate, up, out});
}

void Model::add(View x, View y) {
  require_width(y, x.width, "the second input of add");
  read(x, "the first input of add");
  read(y, "the second input of add");
  append(AddOp{x, y});
}

void Model::select_rows(View x, View out) {
  require_width(out, x.width, "the output of select_rows");
  check_view(x, "the input of select_rows");
  Rows& rows = buffer_rows_[x.buffer];
  require(rows == Rows::kAll || rows == Rows::kSource,
          "select_rows needs a buffer that holds all rows");
  rows = Rows::kSource;
  buffer_is_lasting_[x.buffer] = true;
  selected_ = true;
  ++section_;
  write(out, "the output of select_rows");
  append(SelectRowsOp{x, out});
}

void Model::logits(View x, int64_t linear) {
  require(selected_, "logits must come after select_rows");
  require_width(x, linear_at(linear).inputs(), "the input of logits");
  require(linear_at(linear).outputs() == sizes_.vocab_size,
          "logits needs a row for each token of the vocabulary");
  read(x, "the input of logits");
  require(!complete_, "logits must be the last op");
  append(PrepareOp{x, linear, kAllWide});
  append_stage(LogitsOp{x, linear});
  complete_ = true;
}

void Model::check_complete() const { require(complete_, "a program must end with logits"); }

}  // namespace shoal
