// From one row of logits to a token: log-probabilities, then the choice.
#pragma once

#include <cstdint>
#include <vector>

#include "aligned_buffer.h"
#include "kernels.h"
#include "sampling_state.h"

namespace shoal {

inline constexpr int kMaxTopLogprobs = 20;

// What to do with a row of logits.
struct LogitsRow {
  SamplingState* state;  // null: score `target`; else choose a token and append it
  int32_t target;
  int32_t num_top;   // alternatives to report; -1: no log-probabilities at all
  int64_t position;  // where the chosen token will stand in its sequence
};

enum class RowStatus : int32_t {
  kOk = 0,
  kNotFinite = 1,   // a logit is NaN or infinity, or all are minus infinity
  kAllBanned = 2,   // bias and bans leave no token
};

// Log-probabilities are natural and of the logits as the model gave them.
struct RowResult {
  RowStatus status;
  int32_t token_id;
  float logprob;
  int32_t top_ids[kMaxTopLogprobs];
  float top_logprobs[kMaxTopLogprobs];
};

// One thread's sampler. Rows are independent: any thread gives the same result.
class Sampler {
 public:
  // `num_tokens`: the logits that may be chosen; those past it are padding and never read.
  Sampler(const Kernels& kernels, int64_t num_tokens);

  RowResult run(const float* logits, const LogitsRow& row);

 private:
  struct Candidate {
    int32_t token_id;
    uint32_t key;  // orders as the logits do
    float weight;  // exp((logit - max) / temperature)
  };

  double log_sum_exp(const float* logits, float max);
  int32_t choose(const float* logits, float max, const LogitsRow& row);
  int32_t sample(const float* logits, float max, const LogitsRow& row);
  int32_t sample_all(double uniform, double total) const;
  void gather_candidates(const float* logits, float max, const SamplingSettings& settings,
                         double total);
  void keep_top_k(int64_t top_k);
  void keep_top_p(double top_p);
  void keep_min_p(double min_p);
  template <typename Measure>
  void keep_largest(double target, Measure measure);

  const Kernels& kernels_;
  int64_t num_tokens_;
  AlignedBuffer<float> changed_;  // the logits after penalties, bias and bans
  AlignedBuffer<float> weights_;
  std::vector<double> block_sums_;
  std::vector<int32_t> ids_;
  std::vector<Candidate> candidates_;  // ascending token ids
};

}  // namespace shoal
