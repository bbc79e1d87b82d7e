// A linear layer to measure: in copies that take turns, so that weights come from memory if they are many.
#pragma once

#include <chrono>
#include <cmath>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

#include "aligned_buffer.h"
#include "arena.h"
#include "linear.h"
#include "thread_pool.h"

namespace shoal {

class TimedLinear {
 public:
  // Of a gated layer the first half of the outputs gate the second, where that can be.
  TimedLinear(Isa isa, int num_threads, WeightSource source, int64_t rows, int copies)
      : x_(static_cast<std::size_t>(rows * source.inputs)),
        stride_(row_stride(source.outputs)),
        pool_(num_threads) {
    source.gated = source.gated && can_multiply_gated(source.type, source.outputs, source.type);
    if (rows < 1 || copies < 1) throw std::invalid_argument("needs at least one row and copy");
    for (int i = 0; i < copies; ++i) layers_.emplace_back(source, isa, arena_);
    // Of all sizes and both signs: multiplying the same number again and again takes less power.
    for (std::size_t i = 0; i < x_.size(); ++i) x_[i] = std::sin(static_cast<float>(i % 65536));
    input_ = {x_.data(), source.inputs, rows, kNoneWide};
    prepared_.reserve(layers_[0].prepared_bytes(rows));
    layers_[0].prepare(input_, 0, rows, prepared_.data());
    if (source.gated) {
      const WeightSource next{source.type, source.data, 2 * kTile, source.outputs / 2};
      next_.emplace(next, isa, arena_);
      next_prepared_.reserve(next_->prepared_bytes(rows));
    } else {
      y_.reserve(rows * stride_);
    }
  }

  // Seconds of a product, the mean over those of about `duration` seconds, at least one.
  double time(double duration) {
    using Seconds = std::chrono::duration<double>;
    const auto start = std::chrono::steady_clock::now();
    double elapsed = 0.0;
    int64_t count = 0;
    do {
      const Linear& layer = layers_[turn_];
      turn_ = (turn_ + 1) % layers_.size();
      if (next_) {
        layer.multiply_gated(pool_, input_, prepared_.data(), *next_, next_prepared_.data());
      } else {
        layer.multiply(pool_, input_, prepared_.data(), y_.data(), stride_);
      }
      elapsed = Seconds(std::chrono::steady_clock::now() - start).count();
      ++count;
    } while (elapsed < duration);
    return elapsed / static_cast<double>(count);
  }

 private:
  Arena arena_;
  std::vector<Linear> layers_;
  std::vector<float> x_;
  LinearInput input_{};
  int64_t stride_;
  AlignedBuffer<float> y_;
  AlignedBuffer<uint8_t> prepared_;
  std::optional<Linear> next_;  // whose input a gated layer writes
  AlignedBuffer<uint8_t> next_prepared_;
  ThreadPool pool_;
  std::size_t turn_ = 0;
};

}  // namespace shoal
