// Memory aligned to a cache line that grows on demand; its contents are not kept when it grows.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "huge_pages.h"

namespace shoal {

template <typename T>
class AlignedBuffer {
 public:
  T* reserve(int64_t count) {
    if (count > capacity_) {
      data_.reset();
      capacity_ = 0;
      data_.reset(static_cast<T*>(allocate_aligned(count * static_cast<int64_t>(sizeof(T)))));
      capacity_ = count;
    }
    return data_.get();
  }
  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  int64_t capacity_ = 0;
};

}  // namespace shoal
