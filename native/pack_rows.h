// Splits the work on a weight matrix at load over threads: there is no pool yet.
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace shoal {

// Calls fn(begin, end) for parts of [0, rows) at once; parts begin at multiples of `step`.
template <typename Fn>
void pack_rows(int64_t rows, int64_t step, Fn&& fn) {
  const int64_t steps = (rows + step - 1) / step;
  const int64_t threads = std::clamp<int64_t>(std::thread::hardware_concurrency(), 1, steps);
  const int64_t rows_each = (steps + threads - 1) / threads * step;
  std::vector<std::jthread> others;  // joined where they go out of scope
  for (int64_t begin = rows_each; begin < rows; begin += rows_each) {
    others.emplace_back([&fn, begin, end = std::min(rows, begin + rows_each)] { fn(begin, end); });
  }
  fn(int64_t{0}, std::min(rows, rows_each));
}

}  // namespace shoal
