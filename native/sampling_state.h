// What the choice of a sequence's next token depends on: its parameters and the tokens seen so far.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace shoal {

struct SamplingSettings {
  uint64_t seed;
  uint32_t sample_index;
  float temperature;  // 0: greedy
  int64_t top_k;      // 0: no limit
  double top_p;
  double min_p;
  float repetition_penalty;
  float presence_penalty;
  float frequency_penalty;
  int64_t min_tokens;  // until so many outputs, `end_token_ids` are banned
  std::vector<int32_t> end_token_ids;
  std::vector<std::pair<int32_t, float>> logit_bias;

  bool has_penalties() const {
    return repetition_penalty != 1.0f || presence_penalty != 0.0f || frequency_penalty != 0.0f;
  }
};

class SamplingState {
 public:
  // All ids must be within the logits that `apply` is called with.
  SamplingState(SamplingSettings settings, const int32_t* prompt, int64_t num_prompt,
                const int32_t* outputs, int64_t num_outputs);

  const SamplingSettings& settings() const { return settings_; }

  // Whether `apply` changes anything at all.
  bool changes_logits() const;

  // In this order: repetition, frequency and presence penalties, logit bias, banned ids.
  void apply(float* logits) const;

  void append(int32_t token_id);

 private:
  struct Seen {
    int32_t token_id;
    int32_t num_outputs;  // 0: in the prompt alone
  };

  Seen& seen(int32_t token_id);
  bool bans_end() const { return num_outputs_ < settings_.min_tokens; }

  SamplingSettings settings_;
  int64_t num_outputs_ = 0;
  std::vector<Seen> seen_;  // each token once, in the order of its first appearance
  std::unordered_map<int32_t, std::size_t> places_;
};

}  // namespace shoal
