#include "thread_pool.h"

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace shoal {
namespace {

// How long an idle thread watches for work before it sleeps. The gaps between the parallel loops of
// a step are far shorter, the gap between two steps is longer: waking costs about as much as this.
constexpr std::chrono::microseconds kSpinTime{50};
constexpr int kPausesPerClockRead = 16;
constexpr int64_t kMaxTasks = INT32_MAX;

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until `ready()` or the time is up; returns what `ready()` said last.
template <typename Ready>
bool spin_until(Ready ready) {
  const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      if (ready()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return ready();
}

}  // namespace

// A loop is over when all its tasks are, not when all threads have looked at it: a thread that lost
// its core before it took a task delays nobody. The tasks left of each part are packed as (end, next); a thread
// takes one from either end by compare-and-swap and reads `call` and `context` only after, when the loop
// can't end without it. So a thread that wakes late finds either a task of the current loop or none.
// A shared loop has one part, taken from the front; a thread that comes late from another kind of loop may once
// take from the back instead.
struct ThreadPool::Impl {
  struct alignas(64) Part {
    std::atomic<uint64_t> left{0};
  };

  explicit Impl(int num_threads) : num_threads(num_threads), parts(num_threads) {}

  const int num_threads;
  std::vector<Part> parts;
  alignas(64) std::atomic<uint32_t> finished{0};
  alignas(64) std::atomic<uint32_t> generation{0};  // counts loops; threads sleep on it
  alignas(64) std::atomic<Order> order{Order::kShared};
  Call call = nullptr;
  void* context = nullptr;
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;

  static uint64_t pack(uint64_t next, uint64_t end) { return end << 32 | next; }

  static bool claim(Part& part, bool first, int64_t* task) {
    uint64_t seen = part.left.load(std::memory_order_acquire);
    for (;;) {
      const uint64_t next = static_cast<uint32_t>(seen), end = seen >> 32;
      if (next >= end) return false;
      const uint64_t rest = first ? pack(next + 1, end) : pack(next, end - 1);
      if (part.left.compare_exchange_weak(seen, rest, std::memory_order_acquire)) {
        *task = static_cast<int64_t>(first ? next : end - 1);
        return true;
      }
    }
  }

  // Runs tasks until none is left; returns how many.
  uint32_t take_part(int thread) {
    uint32_t done = 0;
    int64_t task;
    for (int i = 0; i < num_threads; ++i) {
      Part& part = parts[(thread + i) % num_threads];
      while (claim(part, i == 0 || order.load(std::memory_order_relaxed) == Order::kShared, &task)) {
        call(context, task, thread);
        ++done;
      }
    }
    return done;
  }

  void work(int thread) {
    uint32_t seen = 0;
    while (!stop.load(std::memory_order_relaxed)) {
      const uint32_t done = take_part(thread);
      if (done > 0) {
        finished.fetch_add(done, std::memory_order_acq_rel);
        finished.notify_one();
      }
      const auto changed = [&] { return generation.load(std::memory_order_acquire) != seen; };
      if (!spin_until(changed)) generation.wait(seen, std::memory_order_acquire);
      seen = generation.load(std::memory_order_acquire);
    }
  }

  void wake() {
    generation.fetch_add(1, std::memory_order_acq_rel);
    generation.notify_all();
  }
};

ThreadPool::ThreadPool(int num_threads) : impl_(nullptr) {
  if (num_threads < 1) {
    throw std::invalid_argument("num_threads must be at least 1, got " +
                                std::to_string(num_threads));
  }
  impl_ = new Impl(num_threads);
  for (int thread = 1; thread < num_threads; ++thread) {
    impl_->threads.emplace_back([impl = impl_, thread] { impl->work(thread); });
  }
}

ThreadPool::~ThreadPool() {
  impl_->stop.store(true);
  impl_->wake();
  for (std::thread& thread : impl_->threads) thread.join();
  delete impl_;
}

int ThreadPool::size() const { return impl_->num_threads; }

void ThreadPool::run(int64_t count, Order order, Call call, void* context) {
  if (count > kMaxTasks) throw std::invalid_argument("too many tasks for one parallel loop");
  const int threads = impl_->num_threads;
  if (threads == 1 || count <= 1) {
    for (int64_t task = 0; task < count; ++task) call(context, task, 0);
    return;
  }
  const auto total = static_cast<uint32_t>(count);
  impl_->order.store(order, std::memory_order_relaxed);
  impl_->call = call;
  impl_->context = context;
  impl_->finished.store(0, std::memory_order_relaxed);
  for (int thread = 0; thread < threads; ++thread) {
    const bool shared = order == Order::kShared;
    const int64_t begin = shared ? 0 : count * thread / threads;
    const int64_t end = shared ? (thread == 0 ? count : 0) : count * (thread + 1) / threads;
    impl_->parts[thread].left.store(Impl::pack(begin, end), std::memory_order_release);
  }
  impl_->wake();

  uint32_t done = impl_->take_part(0);
  done = impl_->finished.fetch_add(done, std::memory_order_acq_rel) + done;
  const auto all_done = [&] { return impl_->finished.load(std::memory_order_acquire) == total; };
  if (done == total || spin_until(all_done)) return;
  while ((done = impl_->finished.load(std::memory_order_acquire)) != total) {
    impl_->finished.wait(done, std::memory_order_acquire);
  }
}

}  // namespace shoal
