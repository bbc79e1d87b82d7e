// Passes over one row of logits: maximum, largest few, softmax weights, entries above a threshold.
#pragma once

#include "kernels.h"
#include "partial.h"

namespace shoal::SHOAL_ISA_NAMESPACE {

inline constexpr float kMinusInfinity = -__builtin_inff();
inline constexpr int64_t kScanBlock = 4 * kLanes;  // entries that are skipped or looked at together

inline float block_max(const float* x, int64_t count) {
  Vec highest = load_first(x, count, kMinusInfinity);
  for (int64_t i = kLanes; i < count && i < kScanBlock; i += kLanes) {
    highest = max(highest, load_first(x + i, count - i, kMinusInfinity));
  }
  return reduce_max(highest);
}

inline LogitsSummary summarize(const float* logits, int64_t n) {
  const Vec one = Vec::broadcast(1.0f);
  Vec highest = Vec::broadcast(kMinusInfinity), ordered = one;
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec x = load_first(logits + i, n - i, kMinusInfinity);
    highest = max(highest, x);
    ordered = min(ordered, keep_if_ge(x, x, one));  // NaN is not >= itself
  }
  return {reduce_max(highest), reduce_add(ordered) != static_cast<float>(kLanes)};
}

// Keeps the best so far sorted. Later entries must be strictly larger to displace, so that ties go to
// the lower index; blocks without such an entry are skipped.
inline void top_n(const float* logits, int64_t n, int64_t count, int32_t* ids, float* values) {
  int64_t filled = 0;
  for (int64_t start = 0; start < n; start += kScanBlock) {
    const int64_t end = start + kScanBlock < n ? start + kScanBlock : n;
    if (filled == count && !(block_max(logits + start, end - start) > values[count - 1])) continue;
    for (int64_t i = start; i < end; ++i) {
      if (filled == count && !(logits[i] > values[count - 1])) continue;
      int64_t place = filled < count ? filled++ : count - 1;
      for (; place > 0 && logits[i] > values[place - 1]; --place) {
        values[place] = values[place - 1];
        ids[place] = ids[place - 1];
      }
      values[place] = logits[i];
      ids[place] = static_cast<int32_t>(i);
    }
  }
}

inline void exp_weights(const float* logits, int64_t n, float max, float inverse_temperature,
                        float* weights, double* block_sums) {
  const Vec highest = Vec::broadcast(max), inverse = Vec::broadcast(inverse_temperature);
  for (int64_t start = 0; start < n; start += kWeightBlock) {
    const int64_t end = start + kWeightBlock < n ? start + kWeightBlock : n;
    Vec sum = Vec::zero();
    for (int64_t i = start; i < end; i += kLanes) {
      const Vec x = load_first(logits + i, end - i, kMinusInfinity);
      const Vec weight = exp((x - highest) * inverse);
      if (weights != nullptr) store_first(weight, weights + i, end - i);
      sum += weight;
    }
    block_sums[start / kWeightBlock] = static_cast<double>(reduce_add(sum));
  }
}

inline int64_t collect(const float* logits, int64_t n, float threshold, int32_t* ids) {
  int64_t count = 0;
  for (int64_t start = 0; start < n; start += kScanBlock) {
    const int64_t end = start + kScanBlock < n ? start + kScanBlock : n;
    if (!(block_max(logits + start, end - start) >= threshold)) continue;
    for (int64_t i = start; i < end; ++i) {
      if (logits[i] >= threshold) ids[count++] = static_cast<int32_t>(i);
    }
  }
  return count;
}

}  // namespace shoal::SHOAL_ISA_NAMESPACE
