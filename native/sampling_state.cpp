#include "sampling_state.h"

#include <limits>

namespace shoal {

SamplingState::SamplingState(SamplingSettings settings, const int32_t* prompt, int64_t num_prompt,
                             const int32_t* outputs, int64_t num_outputs)
    : settings_(std::move(settings)) {
  if (settings_.has_penalties()) {
    for (int64_t i = 0; i < num_prompt; ++i) seen(prompt[i]);
  }
  for (int64_t i = 0; i < num_outputs; ++i) append(outputs[i]);
}

SamplingState::Seen& SamplingState::seen(int32_t token_id) {
  const auto [place, is_new] = places_.try_emplace(token_id, seen_.size());
  if (is_new) seen_.push_back({token_id, 0});
  return seen_[place->second];
}

void SamplingState::append(int32_t token_id) {
  ++num_outputs_;
  if (settings_.has_penalties()) ++seen(token_id).num_outputs;
}

bool SamplingState::changes_logits() const {
  return settings_.has_penalties() || !settings_.logit_bias.empty() ||
         (bans_end() && !settings_.end_token_ids.empty());
}

void SamplingState::apply(float* logits) const {
  for (const Seen& token : seen_) {
    float& logit = logits[token.token_id];
    logit = logit > 0.0f ? logit / settings_.repetition_penalty
                         : logit * settings_.repetition_penalty;
    if (token.num_outputs == 0) continue;
    logit -= settings_.frequency_penalty * static_cast<float>(token.num_outputs);
    logit -= settings_.presence_penalty;
  }
  for (const auto& [token_id, bias] : settings_.logit_bias) logits[token_id] += bias;
  if (!bans_end()) return;
  for (const int32_t token_id : settings_.end_token_ids) {
    logits[token_id] = -std::numeric_limits<float>::infinity();
  }
}

}  // namespace shoal
