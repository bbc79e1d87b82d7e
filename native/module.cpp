// The Python module shoal._native: checks types at the border, releases the GIL, calls the runtime.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "isa.h"
#include "runtime.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shoal {
namespace {

using KvBuffer = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ViewTuple = std::tuple<int64_t, int64_t, int64_t>;

constexpr std::uintptr_t kKvAlignment = 64;

View as_view(const ViewTuple& view) {
  return {std::get<0>(view), std::get<1>(view), std::get<2>(view)};
}

// The model while it is recorded, then the runtime.
class Session {
 public:
  Session(int64_t vocab_size, int64_t max_model_len, int64_t num_layers, int64_t num_kv_heads,
          int64_t head_dim, const Array<float>& rope_cos, const Array<float>& rope_sin,
          const std::string& isa)
      : isa_(isa_from_name(isa.c_str())),
        layout_{num_layers, num_kv_heads, head_dim, kernels_for(isa_).kv_type},
        model_(std::make_unique<Model>(ModelSizes{vocab_size, max_model_len, layout_}, isa_,
                                       as_vector(rope_cos), as_vector(rope_sin))) {}

  Model& model() {
    if (model_ == nullptr) throw std::invalid_argument("the program is complete already");
    return *model_;
  }

  int64_t block_bytes() const {
    return layout_.block_halves() * static_cast<int64_t>(sizeof(uint16_t));
  }

  int64_t add_linear(const std::string& type, const Array<uint8_t>& data, int64_t outputs,
                     int64_t inputs, bool gated) {
    if (outputs < 1 || inputs < 1) throw std::invalid_argument("a matrix must not be empty");
    const int64_t expected = outputs * row_bytes(parse_format(type), inputs);
    if (static_cast<int64_t>(data.size()) != expected) {
      throw std::invalid_argument("a " + type + " matrix of " + std::to_string(outputs) + " x " +
                                  std::to_string(inputs) + " has " + std::to_string(expected) +
                                  " bytes, got " + std::to_string(data.size()));
    }
    return model().add_linear({type, data.data(), outputs, inputs, gated});
  }

  void start(const KvBuffer& kv, int64_t num_valid_tokens, int num_threads) {
    if (reinterpret_cast<std::uintptr_t>(kv.data()) % kKvAlignment != 0) {
      throw std::invalid_argument("the KV buffer must be aligned to 64 bytes");
    }
    const auto num_blocks = static_cast<int64_t>(kv.size()) / block_bytes();
    model().check_complete();
    kv_ = kv;
    runtime_ = std::make_unique<Runtime>(std::move(model_), isa_, num_threads,
                                         reinterpret_cast<uint16_t*>(kv.data()), num_blocks,
                                         num_valid_tokens);
  }

  void close() {
    runtime_.reset();
    kv_ = KvBuffer();
  }

  Runtime& runtime() {
    if (runtime_ == nullptr) throw std::runtime_error("the runtime is not started, or closed");
    return *runtime_;
  }

 private:
  Isa isa_;
  KvLayout layout_;
  std::unique_ptr<Model> model_;
  KvBuffer kv_;  // keeps the borrowed memory alive
  std::unique_ptr<Runtime> runtime_;
};

StepInput step_input(const Ids& token_ids, const Ids& query_start_loc, const Ids& num_computed,
                     const Ids& block_tables, const Ids& block_table_start) {
  return {as_span(token_ids), as_span(query_start_loc), as_span(num_computed),
          as_span(block_tables), as_span(block_table_start)};
}

nb::tuple execute(Session& session, const Ids& token_ids, const Ids& query_start_loc,
                  const Ids& num_computed, const Ids& block_tables, const Ids& block_table_start,
                  const Ids& rows, const Ids& slots, const Ids& targets, const Ids& num_top) {
  Runtime& runtime = session.runtime();
  const StepInput step =
      step_input(token_ids, query_start_loc, num_computed, block_tables, block_table_start);
  const LogitsInput wanted{as_span(rows), as_span(slots), as_span(targets), as_span(num_top)};
  std::vector<RowResult> results;
  {
    const nb::gil_scoped_release release;
    results = runtime.execute(step, wanted);
  }
  return to_arrays(results, wanted.num_top);
}

nb::ndarray<nb::numpy, float> logits(Session& session, const Ids& token_ids,
                                     const Ids& query_start_loc, const Ids& num_computed,
                                     const Ids& block_tables, const Ids& block_table_start,
                                     const Ids& rows) {
  Runtime& runtime = session.runtime();
  const StepInput step =
      step_input(token_ids, query_start_loc, num_computed, block_tables, block_table_start);
  std::vector<float> out(rows.size() * static_cast<size_t>(runtime.vocab_size()));
  {
    const nb::gil_scoped_release release;
    runtime.logits(step, as_span(rows), out.data());
  }
  return to_numpy(std::move(out), {rows.size(), static_cast<size_t>(runtime.vocab_size())});
}

void bind_settings(nb::module_& module) {
  nb::class_<SamplingSettings>(module, "SamplingSettings")
      .def(
          "__init__",
          [](SamplingSettings* self, uint64_t seed, uint32_t sample_index, float temperature,
             int64_t top_k, double top_p, double min_p, float repetition_penalty,
             float presence_penalty, float frequency_penalty, int64_t min_tokens,
             std::vector<int32_t> end_token_ids,
             std::vector<std::pair<int32_t, float>> logit_bias) {
            new (self) SamplingSettings{seed,
                                        sample_index,
                                        temperature,
                                        top_k,
                                        top_p,
                                        min_p,
                                        repetition_penalty,
                                        presence_penalty,
                                        frequency_penalty,
                                        min_tokens,
                                        std::move(end_token_ids),
                                        std::move(logit_bias)};
          },
          nb::kw_only(), "seed"_a, "sample_index"_a, "temperature"_a, "top_k"_a, "top_p"_a,
          "min_p"_a, "repetition_penalty"_a, "presence_penalty"_a, "frequency_penalty"_a,
          "min_tokens"_a, "end_token_ids"_a, "logit_bias"_a);
}

void bind_recording(nb::class_<Session>& session) {
  session
      .def(nb::init<int64_t, int64_t, int64_t, int64_t, int64_t, const Array<float>&,
                    const Array<float>&, const std::string&>(),
           "vocab_size"_a, "max_model_len"_a, "num_layers"_a, "num_kv_heads"_a, "head_dim"_a,
           "rope_cos"_a, "rope_sin"_a, "isa"_a)
      .def_prop_ro("block_bytes", &Session::block_bytes)
      .def("add_buffer", [](Session& s, int64_t columns) { return s.model().add_buffer(columns); })
      .def("add_linear", &Session::add_linear, "storage_type"_a, "data"_a, "outputs"_a, "inputs"_a,
           "gated"_a = false)
      .def("embed", [](Session& s, const ViewTuple& out,
                       int64_t linear) { s.model().embed(as_view(out), linear); })
      .def("rms_norm",
           [](Session& s, const ViewTuple& x, const ViewTuple& out, const Array<float>& weight,
              float epsilon) {
             s.model().rms_norm(as_view(x), as_view(out), as_vector(weight), epsilon);
           })
      .def("linear",
           [](Session& s, const ViewTuple& x, const ViewTuple& out, int64_t linear, int64_t first_wide) {
             s.model().linear(as_view(x), as_view(out), linear, first_wide);
           })
      .def("feed_forward",
           [](Session& s, const ViewTuple& x, const ViewTuple& out, int64_t gate_up,
              int64_t down, bool wide) {
             s.model().feed_forward(as_view(x), as_view(out), gate_up, down, wide ? kAllWide : kNoneWide);
           })
      .def("add_bias",
           [](Session& s, const ViewTuple& x, const Array<float>& bias) {
             s.model().add_bias(as_view(x), as_vector(bias));
           })
      .def("rope",
           [](Session& s, const ViewTuple& x, int64_t num_heads, int64_t head_dim,
              int64_t rotary_dim, bool interleaved) {
             s.model().rope(as_view(x), {num_heads, head_dim, rotary_dim, interleaved});
           })
      .def("attention",
           [](Session& s, const ViewTuple& q, const ViewTuple& k, const ViewTuple& v,
              const ViewTuple& out, int64_t layer, int64_t num_heads, int64_t num_kv_heads,
              int64_t head_dim, float scale, int64_t window, float soft_cap) {
             s.model().attention(as_view(q), as_view(k), as_view(v), as_view(out), layer,
                                 {num_heads, num_kv_heads, head_dim, window, scale, soft_cap});
           })
      .def("gated_activation",
           [](Session& s, const ViewTuple& gate, const ViewTuple& up, const ViewTuple& out) {
             s.model().gated_activation(as_view(gate), as_view(up), as_view(out));
           })
      .def("add", [](Session& s, const ViewTuple& x,
                     const ViewTuple& y) { s.model().add(as_view(x), as_view(y)); })
      .def("select_rows", [](Session& s, const ViewTuple& x,
                             const ViewTuple& out) { s.model().select_rows(as_view(x), as_view(out)); })
      .def("logits", [](Session& s, const ViewTuple& x,
                        int64_t linear) { s.model().logits(as_view(x), linear); });
}

void bind_running(nb::class_<Session>& session) {
  session
      .def("start", &Session::start, "kv"_a, "num_valid_tokens"_a, "num_threads"_a)
      .def("close", &Session::close)
      .def("set_slot",
           [](Session& s, int64_t slot, const SamplingSettings& settings, const Ids& prompt,
              const Ids& outputs) {
             s.runtime().set_slot(slot, settings, as_span(prompt), as_span(outputs));
           })
      .def("clear_slot", [](Session& s, int64_t slot) { s.runtime().clear_slot(slot); })
      .def("execute", &execute, "token_ids"_a, "query_start_loc"_a, "num_computed_tokens"_a,
           "block_tables"_a, "block_table_start"_a, "rows"_a, "slots"_a, "targets"_a,
           "num_top"_a)
      .def("compute_logits", &logits, "token_ids"_a, "query_start_loc"_a,
           "num_computed_tokens"_a, "block_tables"_a, "block_table_start"_a, "rows"_a);
}

}  // namespace

nb::tuple to_arrays(const std::vector<RowResult>& results, std::span<const int32_t> num_top) {
  const size_t count = results.size();
  size_t width = 0;
  for (const int32_t top : num_top) width = std::max<size_t>(width, std::max(top, 0));
  std::vector<int32_t> status(count), token_ids(count), top_ids(count * width);
  std::vector<float> logprobs(count), top_logprobs(count * width);
  for (size_t i = 0; i < count; ++i) {
    status[i] = static_cast<int32_t>(results[i].status);
    token_ids[i] = results[i].token_id;
    logprobs[i] = results[i].logprob;
    std::copy_n(results[i].top_ids, width, top_ids.data() + i * width);
    std::copy_n(results[i].top_logprobs, width, top_logprobs.data() + i * width);
  }
  return nb::make_tuple(to_numpy(std::move(status), {count}),
                        to_numpy(std::move(token_ids), {count}),
                        to_numpy(std::move(logprobs), {count}),
                        to_numpy(std::move(top_ids), {count, width}),
                        to_numpy(std::move(top_logprobs), {count, width}));
}

}  // namespace shoal

NB_MODULE(_native, m) {
  m.doc() = "The native runtime of Shoal; shoal.executor.native is its only user.";
  shoal::bind_settings(m);
  auto session = nb::class_<shoal::Session>(m, "Session");
  shoal::bind_recording(session);
  shoal::bind_running(session);
  m.def("default_isa", [] { return shoal::isa_name(shoal::isa_from_environment()); });
  m.def("can_multiply_gated", &shoal::can_multiply_gated);
  auto kernels = m.def_submodule("kernels", "Single kernels, for the tests.");
  shoal::bind_kernels(kernels);
}
