// The natural logarithm in plain double arithmetic: libraries differ in the last bit, this doesn't.
#pragma once

#include <bit>
#include <cstdint>

namespace shoal {

// ln x for finite x of at least 2^-1022, to about 1e-16 relative: x = m 2^e with m within
// [sqrt(1/2), sqrt(2)), then ln m = 2 artanh(s), s = (m - 1) / (m + 1), as a series.
inline double natural_log(double x) {
  const auto bits = std::bit_cast<uint64_t>(x);
  auto exponent = static_cast<int64_t>(bits >> 52) - 1023;
  double m = std::bit_cast<double>((bits & 0xfffffffffffffULL) | 0x3ff0000000000000ULL);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    ++exponent;
  }
  const double s = (m - 1.0) / (m + 1.0), square = s * s;  // |s| < 0.172
  double series = 0.0;
  for (int k = 21; k >= 1; k -= 2) series = series * square + 1.0 / k;
  return static_cast<double>(exponent) * 0.6931471805599453 + 2.0 * s * series;
}

}  // namespace shoal
