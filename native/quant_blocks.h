// The block formats of GGML, decoded group by group while weights are packed at load.
#pragma once

#include <cstdint>
#include <string>

namespace shoal {

inline constexpr int kGroup = 32;  // columns whose activations share a power of two

// How quantised weights are kept: w = scale * (q - zero) + min.
enum class Format { kQ4_1, kQ4_0, kQ8_0, kQ4_K, kQ5_K, kQ6_K, kF32, kF16, kBF16 };

// Throws std::invalid_argument naming an unknown type.
Format parse_format(const std::string& type);

// Bytes of one row of `inputs` columns in the file. Throws std::invalid_argument when `inputs` is not a
// multiple of the block.
int64_t row_bytes(Format format, int64_t inputs);

bool is_quantized(Format format);

// Whether all weights of a row of `inputs` columns are numbers.
bool is_finite_row(Format format, const uint8_t* row, int64_t inputs);

// 32 consecutive columns of one row. Scales are float and exact; `scale[1]` applies to columns 16 to 31
// (it equals scale[0] in all formats but Q6_K).
struct DecodedGroup {
  uint8_t q[kGroup];
  float scale[2];
  float min;
};

// Decodes group `group` (columns 32 * group onwards) of the row that starts at `row`.
DecodedGroup decode_group(Format format, const uint8_t* row, int64_t group);

// Software conversions, for packing and single values only.
float half_bits_to_float(uint16_t bits);
uint16_t float_to_half_bits(float x);  // to nearest, ties to even

}  // namespace shoal
