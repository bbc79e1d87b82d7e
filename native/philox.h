// Philox4x32-10, a counter-based random number generator (Salmon, Moraes, Dror and Shaw, "Parallel
// random numbers: as easy as 1, 2, 3", SC 2011): a bijection of a 128-bit counter under a 64-bit key.
#pragma once

#include <array>
#include <cstdint>

namespace shoal {

inline std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, uint64_t seed) {
  auto key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key0,
               static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key1,
               static_cast<uint32_t>(product0)};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return counter;
}

// The number in [0, 1) that decides the token at `position` of sample `sample_index`.
inline double sampling_uniform(uint64_t seed, uint32_t sample_index, uint64_t position) {
  const auto bits = philox4x32({static_cast<uint32_t>(position),
                                static_cast<uint32_t>(position >> 32), sample_index, 0},
                               seed);
  const uint64_t mantissa = (uint64_t{bits[0]} << 21) | (bits[1] >> 11);
  return static_cast<double>(mantissa) * 0x1p-53;
}

}  // namespace shoal
