// Memory aligned to a cache line that grows on demand; its contents are not kept when it grows.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace shoal {

template <typename T>
class AlignedBuffer {
 public:
  T* reserve(int64_t count) {
    if (count > capacity_) {
      constexpr int64_t kAlignment = 64;
      const int64_t bytes = (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment;
      data_.reset();
      capacity_ = 0;
      data_.reset(static_cast<T*>(
          std::aligned_alloc(kAlignment, static_cast<std::size_t>(bytes * kAlignment))));
      if (data_ == nullptr) throw std::bad_alloc();
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
