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

  // Calls fn(i) for each i in [0, count) once, tasks handed out in order from an atomic counter;
  // returns when all are done. fn(task, thread) may use `thread` (0..size-1) for scratch space only:
  // a result must not depend on it. Not reentrant.
  template <typename F>
  void parallel_for(int64_t count, F&& fn) {
    run(count, [](void* context, int64_t task, int thread) {
      (*static_cast<std::remove_reference_t<F>*>(context))(task, thread);
    }, &fn);
  }

 private:
  void run(int64_t count, void (*fn)(void*, int64_t, int), void* context);
  struct Impl;
  Impl* impl_;
};

}  // namespace shoal
