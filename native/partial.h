// Loads and stores of the last, partly filled vector of a row.
#pragma once

#include "vec.h"

namespace shoal::SHOAL_ISA_NAMESPACE {

SHOAL_INLINE Vec load_first(const float* p, int64_t count, float fill = 0.0f) {
  if (count >= kLanes) return Vec::load(p);
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = i < count ? p[i] : fill;
  return Vec::load(lanes);
}

SHOAL_INLINE void store_first(Vec x, float* p, int64_t count) {
  if (count >= kLanes) return x.store(p);
  float lanes[kLanes];
  x.store(lanes);
  for (int i = 0; i < count; ++i) p[i] = lanes[i];
}

}  // namespace shoal::SHOAL_ISA_NAMESPACE
