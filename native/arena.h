// Memory for packed weights: never moved, freed all at once, on huge pages where the system gives them.
//
// A step reads all weights once, in order: on pages of 4 KiB that costs a translation for each.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "huge_pages.h"

namespace shoal {

class Arena {
 public:
  // Zeroed, aligned to a cache line. Throws std::bad_alloc.
  uint8_t* allocate(int64_t bytes) {
    bytes = (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
    if (bytes > left_) {
      left_ = std::max(bytes, kChunkBytes);
      chunks_.push_back(map(left_));
      next_ = chunks_.back().get();
    }
    uint8_t* const result = next_;
    next_ += bytes;
    left_ -= bytes;
    return result;
  }

 private:
  static constexpr int64_t kChunkBytes = 16 * kHugePage;
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  using Chunk = std::unique_ptr<uint8_t, Free>;

  static Chunk map(int64_t bytes) {
    Chunk chunk(static_cast<uint8_t*>(allocate_aligned(bytes)));
    std::fill_n(chunk.get(), bytes, uint8_t{0});
    return chunk;
  }

  std::vector<Chunk> chunks_;
  uint8_t* next_ = nullptr;
  int64_t left_ = 0;
};

}  // namespace shoal
