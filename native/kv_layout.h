// Where the keys and values of a token lie in the KV buffer.
//
//   [num_blocks][num_layers][num_kv_heads] { K: half [head_dim][16], V: half [16][head_dim] }
//
// A block of 16 tokens is one contiguous chunk over all layers. K is transposed inside a block so that
// its 16 tokens are the 16 lanes of a vector. With AVX-512 and AMX elements have 8 bits, and their order and
// scales are those of kv_int8_kernels.h.
#pragma once

#include <cstdint>

namespace shoal {

inline constexpr int kBlockSize = 16;  // tokens of a block

enum class KvType {
  kHalf,
  kInt8,  // and two scales of 2 bytes for each token
};

struct KvLayout {
  int64_t num_layers;
  int64_t num_kv_heads;
  int64_t head_dim;
  KvType type;

  // All in halves (2 bytes).
  int64_t head_halves() const {
    return type == KvType::kHalf ? 2 * kBlockSize * head_dim : kBlockSize * (head_dim + 2);
  }
  int64_t block_halves() const { return num_layers * num_kv_heads * head_halves(); }
  int64_t head_offset(int64_t layer, int64_t kv_head) const {
    return (layer * num_kv_heads + kv_head) * head_halves();
  }
};

}  // namespace shoal
