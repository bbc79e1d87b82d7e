// A power of two for results that are rounded to 14 bits or fewer anyway.
#pragma once

#include "vec.h"

#if defined(__AVX512VNNI__)

namespace shoal::SHOAL_ISA_NAMESPACE {

// 2^x with a relative error of 7.5e-5; 0 for x = -inf.
SHOAL_INLINE Vec exp2(Vec x) {
  const Vec r = {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};  // x - floor(x)
  Vec p = fma(Vec::broadcast(0.078024523f), r, Vec::broadcast(0.22606716f));
  p = fma(p, r, Vec::broadcast(0.69583354f));
  p = fma(p, r, Vec::broadcast(0.99992522f));
  return {_mm512_scalef_ps(p.v, x.v)};  // p 2^floor(x)
}

}  // namespace shoal::SHOAL_ISA_NAMESPACE

#endif
