// A pool of threads that run one function at a time, all of them together.
#pragma once

#include <cstdint>
#include <type_traits>

namespace shoal {

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);  // including the calling thread
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const;

  // Calls fn(i) for each i in [0, count) once, tasks handed out in order, as a rule;
  // returns when all are done. fn(task, thread) may use `thread` (0..size-1) for scratch space only:
  // a result must not depend on it. Not reentrant.
  template <typename F>
  void parallel_for(int64_t count, F&& fn) {
    run(count, Order::kShared, caller<F>, &fn);
  }

  // The same for tasks whose data lie one behind the other: each thread takes the tasks of its own part in
  // order, so that it reads one stream, and then the last ones of other parts.
  template <typename F>
  void parallel_parts(int64_t count, F&& fn) {
    run(count, Order::kParts, caller<F>, &fn);
  }

 private:
  enum class Order { kShared, kParts };
  using Call = void (*)(void* context, int64_t task, int thread);

  template <typename F>
  static void caller(void* context, int64_t task, int thread) {
    (*static_cast<std::remove_reference_t<F>*>(context))(task, thread);
  }

  void run(int64_t count, Order order, Call call, void* context);
  struct Impl;
  Impl* impl_;
};

}  // namespace shoal
