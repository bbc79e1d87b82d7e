// Runs the steps of an engine: checks a step's input, computes its rows, samples.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "forward.h"
#include "model.h"
#include "sampler.h"
#include "thread_pool.h"

namespace shoal {

// A step as Python lays it out. Sequence s computes the tokens [query_start_loc[s],
// query_start_loc[s + 1]), which stand at positions num_computed_tokens[s] onwards; its block table is
// [block_table_start[s], block_table_start[s + 1]) of block_tables.
struct StepInput {
  std::span<const int32_t> token_ids;
  std::span<const int32_t> query_start_loc;
  std::span<const int32_t> num_computed_tokens;
  std::span<const int32_t> block_tables;
  std::span<const int32_t> block_table_start;
};

// The rows whose logits are needed, in parallel arrays. slots[i] >= 0 chooses the token after rows[i]
// with that slot's sampling state; slots[i] = -1 scores targets[i] as that token. num_top[i] is the
// number of alternatives to report, -1 for no log-probabilities.
struct LogitsInput {
  std::span<const int32_t> rows;
  std::span<const int32_t> slots;
  std::span<const int32_t> targets;
  std::span<const int32_t> num_top;
};

// Not for concurrent use by design: calls are serialised.
class Runtime {
 public:
  // `model` must be complete. `kv` is borrowed: num_blocks blocks. Tokens from num_valid_tokens up are
  // padding of the vocabulary and never chosen.
  Runtime(std::unique_ptr<Model> model, Isa isa, int num_threads, uint16_t* kv,
          int64_t num_blocks, int64_t num_valid_tokens);

  // Sets the sampling state of a slot. Throws std::invalid_argument for a token id out of range.
  void set_slot(int64_t slot, const SamplingSettings& settings, std::span<const int32_t> prompt,
                std::span<const int32_t> outputs);
  void clear_slot(int64_t slot);

  // One step. Throws std::invalid_argument, before anything is computed, for an index out of range.
  std::vector<RowResult> execute(const StepInput& step, const LogitsInput& wanted);

  // The same without sampling; writes logits [rows][vocab_size] to `out`.
  void logits(const StepInput& step, std::span<const int32_t> rows, float* out);

  int64_t vocab_size() const { return model_->sizes().vocab_size; }

 private:
  void read_step(const StepInput& step);
  void read_sequence(const StepInput& step, std::size_t sequence);
  void check_rows(std::span<const int32_t> rows) const;
  void check_wanted(const LogitsInput& wanted) const;
  template <typename F>
  void for_logit_chunks(std::span<const int32_t> rows, F&& use);

  std::mutex mutex_;
  std::unique_ptr<Model> model_;
  const Kernels& kernels_;
  ThreadPool pool_;
  int64_t num_blocks_;
  int64_t num_valid_tokens_;
  Forward forward_;
  std::vector<Sampler> samplers_;  // one a thread
  std::vector<std::optional<SamplingState>> slots_;
  Batch batch_;
};

}  // namespace shoal
