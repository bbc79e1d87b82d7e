// Memory from the system, on huge pages where they are given.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdint>
#include <cstdlib>
#include <new>

namespace shoal {

inline constexpr int64_t kCacheLine = 64;
inline constexpr int64_t kHugePage = 2 << 20;

// At least so many bytes, for std::free: whole huge pages where it is as large as one, else whole lines of
// the cache. Throws std::bad_alloc.
inline void* allocate_aligned(int64_t bytes) {
  const int64_t alignment = bytes < kHugePage ? kCacheLine : kHugePage;
  const auto whole = static_cast<std::size_t>((bytes + alignment - 1) / alignment * alignment);
  void* const memory = std::aligned_alloc(static_cast<std::size_t>(alignment), whole);
  if (memory == nullptr) throw std::bad_alloc();
#if defined(__linux__)
  if (alignment == kHugePage) madvise(memory, whole, MADV_HUGEPAGE);  // only advice: it may fail
#endif
  return memory;
}

}  // namespace shoal
