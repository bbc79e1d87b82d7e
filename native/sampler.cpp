#include "sampler.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "logarithm.h"
#include "philox.h"

namespace shoal {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Unsigned integers in the order of the floats (no NaN; -0 counts as 0).
uint32_t ordered_key(float x) {
  const auto bits = std::bit_cast<uint32_t>(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Below it 1 / temperature overflows; the largest logit then takes everything, as it should.
float inverse(float temperature) {
  return std::min(1.0f / temperature, std::numeric_limits<float>::max());
}

}  // namespace

Sampler::Sampler(const Kernels& kernels, int64_t num_tokens)
    : kernels_(kernels),
      num_tokens_(num_tokens),
      block_sums_((num_tokens + kWeightBlock - 1) / kWeightBlock),
      ids_(num_tokens) {
  changed_.reserve(num_tokens);
  weights_.reserve(num_tokens);
}

double Sampler::log_sum_exp(const float* logits, float max) {
  kernels_.exp_weights(logits, num_tokens_, max, 1.0f, nullptr, block_sums_.data());
  double sum = 0.0;
  for (const double block : block_sums_) sum += block;
  return static_cast<double>(max) + natural_log(sum);
}

RowResult Sampler::run(const float* logits, const LogitsRow& row) {
  RowResult result{};
  const LogitsSummary summary = kernels_.summarize(logits, num_tokens_);
  if (summary.has_nan || std::isinf(summary.max)) {
    result.status = RowStatus::kNotFinite;
    return result;
  }
  result.token_id = row.state == nullptr ? row.target : choose(logits, summary.max, row);
  if (result.token_id < 0) {
    result.status = RowStatus::kAllBanned;
    return result;
  }
  if (row.state != nullptr) row.state->append(result.token_id);
  if (row.num_top < 0) return result;

  const double normaliser = log_sum_exp(logits, summary.max);
  const auto logprob = [&](float logit) {
    return static_cast<float>(static_cast<double>(logit) - normaliser);
  };
  result.logprob = logprob(logits[result.token_id]);
  float values[kMaxTopLogprobs];
  const int64_t count = std::min<int64_t>(row.num_top, num_tokens_);
  if (count > 0) kernels_.top_n(logits, num_tokens_, count, result.top_ids, values);
  for (int64_t i = 0; i < count; ++i) result.top_logprobs[i] = logprob(values[i]);
  return result;
}

// The token to append, -1 when none is left.
int32_t Sampler::choose(const float* logits, float max, const LogitsRow& row) {
  if (row.state->changes_logits()) {
    std::memcpy(changed_.data(), logits, static_cast<std::size_t>(num_tokens_) * sizeof(float));
    row.state->apply(changed_.data());
    logits = changed_.data();
    max = kernels_.summarize(logits, num_tokens_).max;
    if (max == -kInfinity) return -1;
  }
  if (row.state->settings().temperature > 0.0f) return sample(logits, max, row);
  int32_t best;
  float value;
  kernels_.top_n(logits, num_tokens_, 1, &best, &value);
  return best;
}

int32_t Sampler::sample(const float* logits, float max, const LogitsRow& row) {
  const SamplingSettings& settings = row.state->settings();
  kernels_.exp_weights(logits, num_tokens_, max, inverse(settings.temperature), weights_.data(),
                       block_sums_.data());
  double total = 0.0;
  for (const double block : block_sums_) total += block;
  const double uniform = sampling_uniform(settings.seed, settings.sample_index,
                                          static_cast<uint64_t>(row.position));
  const bool limits_k = settings.top_k > 0 && settings.top_k < num_tokens_;
  if (!limits_k && settings.top_p >= 1.0 && settings.min_p <= 0.0) {
    return sample_all(uniform, total);
  }
  gather_candidates(logits, max, settings, total);
  if (limits_k) keep_top_k(settings.top_k);
  if (settings.top_p < 1.0) {
    // Without top_k the candidates are a part of all tokens, whose total counts.
    double kept = total;
    if (limits_k) {
      kept = 0.0;
      for (const Candidate& candidate : candidates_) kept += candidate.weight;
    }
    keep_top_p(settings.top_p * kept);
  }
  if (settings.min_p > 0.0) keep_min_p(settings.min_p);

  total = 0.0;
  for (const Candidate& candidate : candidates_) total += candidate.weight;
  double left = uniform * total;
  int32_t last = candidates_.front().token_id;
  for (const Candidate& candidate : candidates_) {
    if (candidate.weight == 0.0f) continue;
    last = candidate.token_id;
    left -= candidate.weight;
    if (left < 0.0) break;
  }
  return last;
}

// Inverse of the cumulative distribution over all tokens: first by block, then inside it.
int32_t Sampler::sample_all(double uniform, double total) const {
  double left = uniform * total;
  std::size_t block = 0;
  for (; block + 1 < block_sums_.size() && left >= block_sums_[block]; ++block) {
    left -= block_sums_[block];
  }
  while (block > 0 && block_sums_[block] == 0.0) --block;  // rounding led past the last weight
  const int64_t begin = static_cast<int64_t>(block) * kWeightBlock;
  const int64_t end = std::min<int64_t>(begin + kWeightBlock, num_tokens_);
  int64_t last = begin;
  for (int64_t i = begin; i < end; ++i) {
    const float weight = weights_.data()[i];
    if (weight == 0.0f) continue;
    last = i;
    left -= static_cast<double>(weight);
    if (left < 0.0) break;
  }
  return static_cast<int32_t>(last);
}

// Collects a superset of what the filters keep, ascending by token: all logits above a threshold that
// is lowered until they suffice. Mostly the first one does, which spares all others.
void Sampler::gather_candidates(const float* logits, float max, const SamplingSettings& settings,
                                double total) {
  for (const float margin : {6.0f, 14.0f, kInfinity}) {
    const float threshold = max - margin * settings.temperature;
    const int64_t count = kernels_.collect(logits, num_tokens_, threshold, ids_.data());
    candidates_.clear();
    double mass = 0.0;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t id = ids_[i];
      candidates_.push_back({id, ordered_key(logits[id]), weights_.data()[id]});
      mass += weights_.data()[id];
    }
    if (margin == kInfinity) return;
    // Weights below exp(-margin) are missing, with room for the rounding of exp and the threshold.
    const bool enough_for_k = settings.top_k > 0 && count >= settings.top_k;
    const bool enough_for_p = settings.top_p < 1.0 && mass >= settings.top_p * total;
    const bool enough_for_min_p = settings.min_p > (margin < 10.0f ? 2.6e-3 : 1e-6);
    if (settings.top_k > 0 ? enough_for_k
                           : enough_for_p || (settings.top_p >= 1.0 && enough_for_min_p)) {
      return;
    }
  }
}

void Sampler::keep_top_k(int64_t top_k) {
  keep_largest(static_cast<double>(top_k), [](const Candidate&) { return 1.0; });
}

void Sampler::keep_top_p(double mass) {
  keep_largest(mass, [](const Candidate& candidate) { return double{candidate.weight}; });
}

void Sampler::keep_min_p(double min_p) {
  // The largest weight is exp(0) = 1.
  std::erase_if(candidates_, [min_p](const Candidate& c) { return double{c.weight} < min_p; });
}

// Keeps the shortest prefix of the candidates, by descending logit and ascending id, whose measures
// sum to `target` or more; all when they don't reach it. A radix selection: a histogram of the leading
// bits tells in which bucket the prefix ends, and the next bits divide that bucket.
template <typename Measure>
void Sampler::keep_largest(double target, Measure measure) {
  constexpr int kBits[] = {11, 11, 10};
  uint32_t prefix = 0;
  int shift = 32;
  for (const int bits : kBits) {
    std::array<double, 2048> sums{};
    const int above = shift;
    shift -= bits;
    const uint32_t mask = (1u << bits) - 1;
    uint32_t lowest = mask;
    for (const Candidate& candidate : candidates_) {
      if (above < 32 && candidate.key >> above != prefix) continue;
      const uint32_t bucket = (candidate.key >> shift) & mask;
      sums[bucket] += measure(candidate);
      lowest = std::min(lowest, bucket);
    }
    uint32_t bucket = mask;
    for (; bucket > lowest && sums[bucket] < target; --bucket) target -= sums[bucket];
    prefix = (prefix << bits) | bucket;
  }
  std::erase_if(candidates_, [&](const Candidate& candidate) {
    if (candidate.key != prefix) return candidate.key < prefix;
    const bool reached = target <= 0.0;
    target -= measure(candidate);
    return reached;
  });
}

}  // namespace shoal
