// Kernels that work on one row alone: normalisation, rotation, activation, addition.
#pragma once

#include "kernels.h"
#include "partial.h"

namespace shoal::SHOAL_ISA_NAMESPACE {

// Sums squares in four chains of vectors: column i adds to chain (i / 16) mod 4, lane i mod 16.
inline float sum_of_squares(const float* x, int64_t n) {
  Vec sum[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int chain = 0; chain < 4; ++chain) {
      const Vec v = Vec::load(x + i + chain * kLanes);
      sum[chain] = fma(v, v, sum[chain]);
    }
  }
  for (int chain = 0; i < n; i += kLanes, ++chain) {
    const Vec v = load_first(x + i, n - i);
    sum[chain] = fma(v, v, sum[chain]);
  }
  return reduce_add((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

inline void rms_norm(const float* x, const float* weight, float* out, int64_t n, float epsilon) {
  const float mean = sum_of_squares(x, n) / static_cast<float>(n);
  const Vec inverse = Vec::broadcast(1.0f / __builtin_sqrtf(mean + epsilon));
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec normed = load_first(x + i, n - i) * inverse;
    store_first(normed * load_first(weight + i, n - i), out + i, n - i);
  }
}

// Pairs (i, i + half).
inline void rotate_halves(float* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t count = half - i;
    const Vec a = load_first(x + i, count), b = load_first(x + half + i, count);
    const Vec c = load_first(cos + i, count), s = load_first(sin + i, count);
    store_first(a * c - b * s, x + i, count);
    store_first(b * c + a * s, x + half + i, count);
  }
}

// Pairs (2i, 2i + 1).
inline void rotate_pairs(float* x, const float* __restrict cos, const float* __restrict sin,
                         int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * cos[i] - b * sin[i];
    x[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

inline void rope(float* x, const float* cos, const float* sin, const RopeShape& shape) {
  for (int64_t head = 0; head < shape.num_heads; ++head, x += shape.head_dim) {
    if (shape.interleaved) {
      rotate_pairs(x, cos, sin, shape.rotary_dim / 2);
    } else {
      rotate_halves(x, cos, sin, shape.rotary_dim / 2);
    }
  }
}

// silu(gate) * up, silu(x) = x / (1 + exp(-x)).
SHOAL_INLINE Vec gate(Vec gate, Vec up) {
  return gate / (Vec::broadcast(1.0f) + exp(Vec::zero() - gate)) * up;
}

inline void gated_silu(const float* gates, const float* up, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    store_first(gate(load_first(gates + i, n - i), load_first(up + i, n - i)), out + i, n - i);
  }
}

inline void add(float* x, const float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    store_first(load_first(x + i, n - i) + load_first(y + i, n - i), x + i, n - i);
  }
}

inline void write_kv(const float* k, const float* v, uint16_t* block, int64_t offset,
                     int64_t head_dim) {
  uint16_t* keys = block + offset;
  uint16_t* values = block + kLanes * head_dim + offset * head_dim;
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    uint16_t halves[kLanes];
    Vec::load(k + d).store_half(halves);
    for (int i = 0; i < kLanes; ++i) keys[(d + i) * kLanes] = halves[i];
    Vec::load(v + d).store_half(values + d);
  }
}

}  // namespace shoal::SHOAL_ISA_NAMESPACE
