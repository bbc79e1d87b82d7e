#include "quant_blocks.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace shoal {

namespace {

constexpr int kSuperBlock = 256;  // columns of a K-quant block

uint16_t load_u16(const uint8_t* p) {
  uint16_t x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

float load_half(const uint8_t* p) { return half_bits_to_float(load_u16(p)); }

// The two nibble halves of a 16-byte run: columns 0 to 15 are the low nibbles, 16 to 31 the high ones.
void decode_nibbles(const uint8_t* packed, uint8_t* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = packed[i] & 0x0f;
    q[i + 16] = packed[i] >> 4;
  }
}

// Scale and min of sub-block j of Q4_K and Q5_K: eight pairs of 6 bits in 12 bytes.
void decode_scale_min(const uint8_t* scales, int64_t j, int* scale, int* min) {
  if (j < 4) {
    *scale = scales[j] & 63;
    *min = scales[j + 4] & 63;
  } else {
    *scale = (scales[j + 4] & 0x0f) | ((scales[j - 4] >> 6) << 4);
    *min = (scales[j + 4] >> 4) | ((scales[j] >> 6) << 4);
  }
}

void decode_k_scales(const uint8_t* block, int64_t sub, DecodedGroup* out) {
  int scale, min;
  decode_scale_min(block + 4, sub, &scale, &min);
  out->scale[0] = out->scale[1] = load_half(block) * static_cast<float>(scale);
  out->min = -(load_half(block + 2) * static_cast<float>(min));
}

// {half d, half dmin, u8 scales[12], u8 qs[128]}
void decode_q4_k(const uint8_t* block, int64_t sub, DecodedGroup* out) {
  decode_k_scales(block, sub, out);
  const uint8_t* qs = block + 16 + 32 * (sub / 2);
  for (int i = 0; i < kGroup; ++i) out->q[i] = sub % 2 == 0 ? qs[i] & 0x0f : qs[i] >> 4;
}

// {half d, half dmin, u8 scales[12], u8 qh[32], u8 qs[128]}
void decode_q5_k(const uint8_t* block, int64_t sub, DecodedGroup* out) {
  decode_k_scales(block, sub, out);
  const uint8_t* qh = block + 16;
  const uint8_t* qs = block + 48 + 32 * (sub / 2);
  for (int i = 0; i < kGroup; ++i) {
    const int low = sub % 2 == 0 ? qs[i] & 0x0f : qs[i] >> 4;
    out->q[i] = static_cast<uint8_t>(low | (((qh[i] >> sub) & 1) << 4));
  }
}

// {u8 ql[128], u8 qh[64], s8 scales[16], half d}; q is kept with its offset of 32.
void decode_q6_k(const uint8_t* block, int64_t sub, DecodedGroup* out) {
  const int64_t half = sub / 4, quarter = sub % 4;
  const uint8_t* ql = block + 64 * half + 32 * (quarter % 2);
  const uint8_t* qh = block + 128 + 32 * half;
  const auto* scales = reinterpret_cast<const int8_t*>(block + 192) + 8 * half + 2 * quarter;
  const float d = load_half(block + 208);
  for (int i = 0; i < kGroup; ++i) {
    const int low = quarter < 2 ? ql[i] & 0x0f : ql[i] >> 4;
    out->q[i] = static_cast<uint8_t>(low | (((qh[i] >> (2 * quarter)) & 3) << 4));
  }
  for (int i = 0; i < 2; ++i) out->scale[i] = d * static_cast<float>(scales[i]);
}

struct BlockShape {
  int columns;
  int bytes;
};

BlockShape block_shape(Format format) {
  switch (format) {
    case Format::kQ4_0: return {kGroup, 18};
    case Format::kQ4_1: return {kGroup, 20};
    case Format::kQ8_0: return {kGroup, 34};
    case Format::kQ4_K: return {kSuperBlock, 144};
    case Format::kQ5_K: return {kSuperBlock, 176};
    case Format::kQ6_K: return {kSuperBlock, 210};
    case Format::kF32: return {1, 4};
    case Format::kF16:
    case Format::kBF16: return {1, 2};
  }
  throw std::logic_error("unknown format");
}

bool is_finite_half(const uint8_t* p) { return (load_u16(p) & 0x7c00) != 0x7c00; }

bool is_finite_block(Format format, const uint8_t* block) {
  switch (format) {
    case Format::kQ4_0:
    case Format::kQ8_0:
    case Format::kF16: return is_finite_half(block);
    case Format::kQ4_1:
    case Format::kQ4_K:
    case Format::kQ5_K: return is_finite_half(block) && is_finite_half(block + 2);
    case Format::kQ6_K: return is_finite_half(block + 208);
    case Format::kBF16: return (load_u16(block) & 0x7f80) != 0x7f80;
    case Format::kF32: return (load_u16(block + 2) & 0x7f80) != 0x7f80;
  }
  throw std::logic_error("unknown format");
}

}  // namespace

Format parse_format(const std::string& type) {
  constexpr struct {
    const char* name;
    Format format;
  } kNames[] = {{"Q4_0", Format::kQ4_0}, {"Q4_1", Format::kQ4_1}, {"Q8_0", Format::kQ8_0},
                {"Q4_K", Format::kQ4_K}, {"Q5_K", Format::kQ5_K}, {"Q6_K", Format::kQ6_K},
                {"F32", Format::kF32},   {"F16", Format::kF16},   {"BF16", Format::kBF16}};
  for (const auto& entry : kNames) {
    if (type == entry.name) return entry.format;
  }
  throw std::invalid_argument("unknown weight type " + type);
}

bool is_quantized(Format format) { return block_shape(format).columns > 1; }

int64_t row_bytes(Format format, int64_t inputs) {
  const BlockShape shape = block_shape(format);
  if (inputs <= 0 || inputs % shape.columns != 0) {
    throw std::invalid_argument("a row of " + std::to_string(inputs) +
                                " columns is not a whole number of blocks of " +
                                std::to_string(shape.columns));
  }
  return inputs / shape.columns * shape.bytes;
}

bool is_finite_row(Format format, const uint8_t* row, int64_t inputs) {
  const BlockShape shape = block_shape(format);
  for (int64_t k = 0; k < inputs; k += shape.columns, row += shape.bytes) {
    if (!is_finite_block(format, row)) return false;
  }
  return true;
}

DecodedGroup decode_group(Format format, const uint8_t* row, int64_t group) {
  DecodedGroup out{};
  const BlockShape shape = block_shape(format);
  const int64_t groups_per_block = shape.columns / kGroup;
  const uint8_t* block = row + group / groups_per_block * shape.bytes;
  const int64_t sub = group % groups_per_block;
  switch (format) {
    case Format::kQ4_0:
      out.scale[0] = out.scale[1] = load_half(block);
      decode_nibbles(block + 2, out.q);
      break;
    case Format::kQ4_1:
      out.scale[0] = out.scale[1] = load_half(block);
      out.min = load_half(block + 2);
      decode_nibbles(block + 4, out.q);
      break;
    case Format::kQ8_0:
      out.scale[0] = out.scale[1] = load_half(block);
      for (int i = 0; i < kGroup; ++i) out.q[i] = static_cast<uint8_t>(block[2 + i] ^ 0x80);
      break;
    case Format::kQ4_K: decode_q4_k(block, sub, &out); break;
    case Format::kQ5_K: decode_q5_k(block, sub, &out); break;
    case Format::kQ6_K: decode_q6_k(block, sub, &out); break;
    default: throw std::logic_error("not a quantised format");
  }
  return out;
}

float half_bits_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1f;
  const uint32_t mantissa = bits & 0x3ff;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  const uint32_t wide = exponent == 31 ? 0xffu : exponent + 112;
  return std::bit_cast<float>(sign | (wide << 23) | (mantissa << 13));
}

uint16_t float_to_half_bits(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00);  // NaN
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < 0x38800000u) {  // below 2^-14: a multiple of 2^-24
    const float scaled = std::nearbyint(std::bit_cast<float>(magnitude) * 0x1p24f);
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(scaled));
  }
  const uint32_t odd = (magnitude >> 13) & 1;
  return static_cast<uint16_t>(sign | ((magnitude - (112u << 23) + 0xfff + odd) >> 13));
}

}  // namespace shoal
