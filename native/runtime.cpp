#include "runtime.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace shoal {
namespace {

constexpr int64_t kMaxSlots = 1 << 20;

void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

// Throws unless 0 <= value < limit.
void require_index(int64_t value, int64_t limit, const char* what) {
  if (value < 0 || value >= limit) {
    throw std::invalid_argument(std::string(what) + " " + std::to_string(value) +
                                " is not within 0 to " + std::to_string(limit - 1));
  }
}

// Checks that `starts` are count + 1 offsets into `total` entries.
void require_offsets(std::span<const int32_t> starts, std::size_t count, std::size_t total,
                     const char* what) {
  const bool fits = starts.size() == count + 1 && starts.front() == 0 &&
                    starts.back() == static_cast<int64_t>(total) &&
                    std::is_sorted(starts.begin(), starts.end());
  if (!fits) {
    throw std::invalid_argument(std::string(what) + " must be " + std::to_string(count + 1) +
                                " ascending offsets from 0 to " + std::to_string(total));
  }
}

}  // namespace

Runtime::Runtime(std::unique_ptr<Model> model, Isa isa, int num_threads, uint16_t* kv,
                 int64_t num_blocks, int64_t num_valid_tokens)
    : model_(std::move(model)),
      kernels_(kernels_for(isa)),
      pool_(num_threads),
      num_blocks_(num_blocks),
      num_valid_tokens_(num_valid_tokens),
      forward_(*model_, kernels_, pool_, kv) {
  require_index(num_valid_tokens - 1, model_->sizes().vocab_size, "last valid token id");
  model_->check_complete();
  for (int thread = 0; thread < num_threads; ++thread) {
    samplers_.emplace_back(kernels_, num_valid_tokens);
  }
}

void Runtime::set_slot(int64_t slot, const SamplingSettings& settings,
                       std::span<const int32_t> prompt, std::span<const int32_t> outputs) {
  const std::lock_guard lock(mutex_);
  require_index(slot, kMaxSlots, "sampling slot");
  for (const int32_t id : prompt) require_index(id, num_valid_tokens_, "prompt token id");
  for (const int32_t id : outputs) require_index(id, num_valid_tokens_, "output token id");
  for (const int32_t id : settings.end_token_ids) {
    require_index(id, num_valid_tokens_, "end token id");
  }
  for (const auto& [id, bias] : settings.logit_bias) {
    require_index(id, num_valid_tokens_, "logit_bias token id");
  }
  if (static_cast<std::size_t>(slot) >= slots_.size()) slots_.resize(slot + 1);
  slots_[slot].emplace(settings, prompt.data(), static_cast<int64_t>(prompt.size()),
                       outputs.data(), static_cast<int64_t>(outputs.size()));
}

void Runtime::clear_slot(int64_t slot) {
  const std::lock_guard lock(mutex_);
  require_index(slot, static_cast<int64_t>(slots_.size()), "sampling slot");
  slots_[slot].reset();
}

void Runtime::read_step(const StepInput& step) {
  const std::size_t count = step.num_computed_tokens.size();
  require(count > 0, "a step needs a sequence");
  require_offsets(step.query_start_loc, count, step.token_ids.size(), "query_start_loc");
  require_offsets(step.block_table_start, count, step.block_tables.size(), "block_table_start");
  for (const int32_t id : step.token_ids) require_index(id, vocab_size(), "token id");
  for (const int32_t id : step.block_tables) require_index(id, num_blocks_, "block id");
  batch_.token_ids.assign(step.token_ids.begin(), step.token_ids.end());
  batch_.positions.clear();
  batch_.kv_slots.clear();
  batch_.sequences.clear();
  for (std::size_t s = 0; s < count; ++s) read_sequence(step, s);
}

void Runtime::read_sequence(const StepInput& step, std::size_t s) {
  const int64_t begin = step.query_start_loc[s], end = step.query_start_loc[s + 1];
  const int64_t first = step.num_computed_tokens[s];
  require(begin < end, "each sequence of a step needs a token");
  require_index(first, model_->sizes().max_model_len, "number of computed tokens");
  require_index(first + (end - begin) - 1, model_->sizes().max_model_len, "position");
  const int32_t* table = step.block_tables.data() + step.block_table_start[s];
  const int64_t num_blocks = step.block_table_start[s + 1] - step.block_table_start[s];
  require_index((first + (end - begin) - 1) / kBlockSize, num_blocks, "place in the block table");
  for (int64_t position = first; position < first + (end - begin); ++position) {
    batch_.positions.push_back(static_cast<int32_t>(position));
    batch_.kv_slots.push_back(int64_t{table[position / kBlockSize]} * kBlockSize +
                              position % kBlockSize);
  }
  batch_.sequences.push_back({begin, end, first, table});
}

void Runtime::check_rows(std::span<const int32_t> rows) const {
  for (const int32_t row : rows) require_index(row, batch_.num_rows(), "row");
}

void Runtime::check_wanted(const LogitsInput& wanted) const {
  const std::size_t count = wanted.rows.size();
  require(wanted.slots.size() == count && wanted.targets.size() == count &&
              wanted.num_top.size() == count,
          "rows, slots, targets and num_top must have the same length");
  check_rows(wanted.rows);
  std::vector<bool> used(slots_.size());
  for (std::size_t i = 0; i < count; ++i) {
    require_index(wanted.num_top[i] + 1, kMaxTopLogprobs + 2, "num_top + 1");
    if (wanted.slots[i] == -1) {
      require_index(wanted.targets[i], num_valid_tokens_, "target token id");
      continue;
    }
    const int32_t slot = wanted.slots[i];
    require_index(slot, static_cast<int64_t>(slots_.size()), "sampling slot");
    require(slots_[slot].has_value(), "a sampling slot is used before it is set");
    require(!used[slot], "a sampling slot is used twice in one step");
    used[slot] = true;
  }
}

// Calls use(first, count, logits) for consecutive parts of `rows`.
template <typename F>
void Runtime::for_logit_chunks(std::span<const int32_t> rows, F&& use) {
  for (std::size_t first = 0; first < rows.size(); first += Forward::kMaxLogitRows) {
    const auto count =
        std::min<int64_t>(Forward::kMaxLogitRows, static_cast<int64_t>(rows.size() - first));
    use(first, count, forward_.compute_logits(batch_, rows.data() + first, count));
  }
}

std::vector<RowResult> Runtime::execute(const StepInput& step, const LogitsInput& wanted) {
  const std::lock_guard lock(mutex_);
  read_step(step);
  check_wanted(wanted);
  forward_.compute_rows(batch_);
  std::vector<RowResult> results(wanted.rows.size());
  for_logit_chunks(wanted.rows, [&](std::size_t first, int64_t count, const float* logits) {
    pool_.parallel_for(count, [&](int64_t i, int thread) {
      const std::size_t at = first + i;
      SamplingState* state = wanted.slots[at] < 0 ? nullptr : &*slots_[wanted.slots[at]];
      const LogitsRow row{state, wanted.targets[at], wanted.num_top[at],
                          int64_t{batch_.positions[wanted.rows[at]]} + 1};
      results[at] = samplers_[thread].run(logits + i * forward_.logits_stride(), row);
    });
  });
  return results;
}

void Runtime::logits(const StepInput& step, std::span<const int32_t> rows, float* out) {
  const std::lock_guard lock(mutex_);
  read_step(step);
  check_rows(rows);
  forward_.compute_rows(batch_);
  for_logit_chunks(rows, [&](std::size_t first, int64_t count, const float* logits) {
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(out + (static_cast<int64_t>(first) + i) * vocab_size(),
                  logits + i * forward_.logits_stride(),
                  static_cast<std::size_t>(vocab_size()) * sizeof(float));
    }
  });
}

}  // namespace shoal
