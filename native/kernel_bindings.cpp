// Single kernels for the tests, each by the name of an instruction set.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "aligned_buffer.h"
#include "attention.h"
#include "bindings.h"
#include "kernels.h"
#include "linear.h"
#include "logarithm.h"
#include "philox.h"
#include "sampler.h"
#include "thread_pool.h"
#include "timed_linear.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shoal {
namespace {

using Floats = Array<float>;
using FloatResult = nb::ndarray<nb::numpy, float>;

const Kernels& kernels(const std::string& isa) { return kernels_for(isa_from_name(isa.c_str())); }

void require_size(std::size_t size, int64_t expected, const char* what) {
  if (static_cast<int64_t>(size) != expected) {
    throw std::invalid_argument(std::string(what) + " must have " + std::to_string(expected) +
                                " entries, got " + std::to_string(size));
  }
}

FloatResult to_result(std::vector<float> values) {
  const std::size_t size = values.size();
  return to_numpy(std::move(values), {size});
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kAmx}) {
    if (isa <= detect_isa()) names.emplace_back(isa_name(isa));
  }
  return names;
}

FloatResult rms_norm(const std::string& isa, const Floats& x, const Floats& weight,
                     float epsilon) {
  require_size(weight.size(), static_cast<int64_t>(x.size()), "weight");
  std::vector<float> out(x.size());
  kernels(isa).rms_norm(x.data(), weight.data(), out.data(), static_cast<int64_t>(x.size()),
                        epsilon);
  return to_result(std::move(out));
}

FloatResult rope(const std::string& isa, const Floats& x, const Floats& cos, const Floats& sin,
                 int64_t head_dim, bool interleaved) {
  const auto half = static_cast<int64_t>(cos.size());
  require_size(sin.size(), half, "sin");
  if (head_dim < 2 * half || static_cast<int64_t>(x.size()) % head_dim != 0) {
    throw std::invalid_argument("x must be whole heads of head_dim >= 2 * len(cos)");
  }
  std::vector<float> out = as_vector(x);
  kernels(isa).rope(out.data(), cos.data(), sin.data(),
                    {static_cast<int64_t>(x.size()) / head_dim, head_dim, 2 * half, interleaved});
  return to_result(std::move(out));
}

FloatResult gated_silu(const std::string& isa, const Floats& gate, const Floats& up) {
  require_size(up.size(), static_cast<int64_t>(gate.size()), "up");
  std::vector<float> out(gate.size());
  kernels(isa).gated_silu(gate.data(), up.data(), out.data(), static_cast<int64_t>(gate.size()));
  return to_result(std::move(out));
}

FloatResult add(const std::string& isa, const Floats& x, const Floats& y) {
  require_size(y.size(), static_cast<int64_t>(x.size()), "y");
  std::vector<float> out = as_vector(x);
  kernels(isa).add(out.data(), y.data(), static_cast<int64_t>(x.size()));
  return to_result(std::move(out));
}

// A block of one KV head in halves, zero but for the token at `offset`.
nb::ndarray<nb::numpy, uint16_t> write_kv(const std::string& isa, const Floats& k,
                                          const Floats& v, int64_t offset) {
  const auto head_dim = static_cast<int64_t>(k.size());
  require_size(v.size(), head_dim, "v");
  if (head_dim % kBlockSize != 0 || offset < 0 || offset >= kBlockSize) {
    throw std::invalid_argument("k must have a multiple of 16 entries and offset be 0 to 15");
  }
  const KvLayout layout{1, 1, head_dim, kernels(isa).kv_type};
  std::vector<uint16_t> block(static_cast<std::size_t>(layout.head_halves()));
  const std::size_t size = block.size();
  kernels(isa).write_kv(k.data(), v.data(), block.data(), offset, head_dim);
  return to_numpy(std::move(block), {size});
}

// The size of a block of keys and values in the KV buffer.
int64_t kv_block_bytes(const std::string& isa, int64_t num_layers, int64_t num_kv_heads,
                       int64_t head_dim) {
  const KvLayout layout{num_layers, num_kv_heads, head_dim, kernels(isa).kv_type};
  return layout.block_halves() * static_cast<int64_t>(sizeof(uint16_t));
}

// What attend_chunk takes of some heads: a copy, prepared.
FloatResult prepare_queries(const std::string& isa, const Floats& q, int64_t head_dim) {
  std::vector<float> prepared = as_vector(q);
  if (kernels(isa).prepare_queries) {
    kernels(isa).prepare_queries(prepared.data(), static_cast<int64_t>(prepared.size()), head_dim);
  }
  return to_result(std::move(prepared));
}

// Attention of a batch over one layer of a KV buffer; q: [rows][num_heads * head_dim]. All indices must
// be in range: this entry is for tests and trusts them.
FloatResult attention(const std::string& isa, int num_threads, const Floats& q,
                      const Array<uint16_t>& kv, const Ids& query_start_loc,
                      const Ids& num_computed_tokens, const Ids& block_tables,
                      const Ids& block_table_start, int64_t num_heads, int64_t num_kv_heads,
                      int64_t head_dim, float scale, int64_t window, float soft_cap) {
  const AttentionHeads heads{num_heads, num_kv_heads, head_dim, window, scale, soft_cap};
  ThreadPool pool(num_threads);
  const KvLayout layout{1, num_kv_heads, head_dim, kernels(isa).kv_type};
  AttentionPlan plan(heads, layout, kernels(isa), num_threads);
  std::vector<Sequence> sequences;
  for (std::size_t s = 0; s < num_computed_tokens.size(); ++s) {
    sequences.push_back({query_start_loc.data()[s], query_start_loc.data()[s + 1],
                         num_computed_tokens.data()[s],
                         block_tables.data() + block_table_start.data()[s]});
  }
  std::vector<float> out(q.size()), queries = as_vector(q);
  {
    const nb::gil_scoped_release release;
    if (kernels(isa).prepare_queries) {
      kernels(isa).prepare_queries(queries.data(), static_cast<int64_t>(queries.size()), head_dim);
    }
    plan.prepare(sequences);
    plan.run(pool, queries.data(), num_heads * head_dim, kv.data(), 0, out.data(),
             num_heads * head_dim);
  }
  return to_result(std::move(out));
}

FloatResult linear(const std::string& isa, int num_threads, const std::string& storage_type,
                   const Array<uint8_t>& weights, int64_t outputs, const Floats& x, int64_t rows,
                   int64_t first_wide) {
  const auto inputs = static_cast<int64_t>(x.size()) / rows;
  require_size(x.size(), rows * inputs, "x");
  Arena arena;
  const Linear layer({storage_type, weights.data(), outputs, inputs}, isa_from_name(isa.c_str()),
                     arena);
  ThreadPool pool(num_threads);
  std::vector<float> y(static_cast<std::size_t>(rows * outputs));
  const LinearInput input{x.data(), inputs, rows, first_wide};
  AlignedBuffer<uint8_t> prepared;
  prepared.reserve(layer.prepared_bytes(rows));
  layer.prepare(input, 0, rows, prepared.data());
  layer.multiply(pool, input, prepared.data(), y.data(), outputs);
  return to_result(std::move(y));
}

// All rows of a layer's weights, as the embedding look-up gives them.
FloatResult dequantize_rows(const std::string& isa, const std::string& storage_type,
                            const Array<uint8_t>& weights, int64_t outputs, int64_t inputs) {
  Arena arena;
  const Linear layer({storage_type, weights.data(), outputs, inputs}, isa_from_name(isa.c_str()),
                     arena);
  std::vector<float> rows(static_cast<std::size_t>(outputs * inputs));
  for (int64_t row = 0; row < outputs; ++row) layer.dequantize_row(row, &rows[row * inputs]);
  return to_result(std::move(rows));
}

// Chooses the token after one row of logits; results as those of Session.execute.
nb::tuple sample(const std::string& isa, const Floats& logits, const SamplingSettings& settings,
                 const Ids& prompt, const Ids& outputs, int64_t position, int32_t num_top) {
  const auto num_tokens = static_cast<int64_t>(logits.size());
  SamplingState state(settings, prompt.data(), static_cast<int64_t>(prompt.size()),
                      outputs.data(), static_cast<int64_t>(outputs.size()));
  Sampler sampler(kernels(isa), num_tokens);
  const RowResult result = sampler.run(logits.data(), {&state, 0, num_top, position});
  return to_arrays({result}, std::span(&num_top, 1));
}

// Runs `loops` pairs of parallel loops of `count` tasks, one of each kind; returns how often each task ran.
nb::ndarray<nb::numpy, int32_t> count_tasks(int num_threads, int64_t count, int64_t loops) {
  std::vector<int32_t> runs(static_cast<std::size_t>(count));
  {
    const nb::gil_scoped_release release;
    ThreadPool pool(num_threads);
    for (int64_t loop = 0; loop < loops; ++loop) {
      pool.parallel_for(count, [&](int64_t task, int) { ++runs[task]; });
      pool.parallel_parts(count, [&](int64_t task, int) { ++runs[task]; });
    }
  }
  return to_numpy(std::move(runs), {static_cast<std::size_t>(count)});
}

std::vector<uint32_t> philox(const std::vector<uint32_t>& counter, uint64_t seed) {
  if (counter.size() != 4) throw std::invalid_argument("the counter has four words");
  const auto words = philox4x32({counter[0], counter[1], counter[2], counter[3]}, seed);
  return {words.begin(), words.end()};
}

}  // namespace

void bind_kernels(nb::module_& module) {
  module.def("instruction_sets", &instruction_sets);
  module.def("rms_norm", &rms_norm);
  module.def("rope", &rope);
  module.def("gated_silu", &gated_silu);
  module.def("add", &add);
  module.def("write_kv", &write_kv);
  module.def("kv_block_bytes", &kv_block_bytes);
  module.def("prepare_queries", &prepare_queries);
  module.def("attention", &attention, "isa"_a, "num_threads"_a, "q"_a, "kv"_a,
             "query_start_loc"_a, "num_computed_tokens"_a, "block_tables"_a,
             "block_table_start"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "scale"_a,
             "window"_a, "soft_cap"_a);
  module.def("linear", &linear, "isa"_a, "num_threads"_a, "storage_type"_a, "weights"_a,
             "outputs"_a, "x"_a, "rows"_a, "first_wide"_a = kNoneWide);
  module.def("dequantize_rows", &dequantize_rows, "isa"_a, "storage_type"_a, "weights"_a,
             "outputs"_a, "inputs"_a);
  nb::class_<TimedLinear>(module, "TimedLinear")
      .def(
          "__init__",
          [](TimedLinear* self, const std::string& isa, int num_threads,
             const std::string& storage_type, const Array<uint8_t>& weights, int64_t outputs,
             int64_t inputs, int64_t rows, int copies, bool gated) {
            const WeightSource source{storage_type, weights.data(), outputs, inputs, gated};
            new (self) TimedLinear(isa_from_name(isa.c_str()), num_threads, source, rows, copies);
          },
          "isa"_a, "num_threads"_a, "storage_type"_a, "weights"_a, "outputs"_a, "inputs"_a, "rows"_a,
          "copies"_a, "gated"_a)
      .def("time", &TimedLinear::time, "duration"_a, nb::call_guard<nb::gil_scoped_release>());
  module.def("sample", &sample, "isa"_a, "logits"_a, "settings"_a, "prompt"_a, "outputs"_a,
             "position"_a, "num_top"_a);
  module.def("count_tasks", &count_tasks);
  module.def("philox", &philox);
  module.def("natural_log", &natural_log);
}

}  // namespace shoal
