// The threads of one operator call, in step with one another without leaving their parallel region.
#pragma once

#include <ATen/Parallel.h>
#include <immintrin.h>
#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cstdint>

namespace millrace {

class Team {
 public:
  // To be called by each thread before anything else: the runtime may have granted fewer threads than were wanted.
  void join() { size_.store(omp_get_num_threads(), std::memory_order_relaxed); }

  // Calls body(first, last) for parts of [0, count) until all are taken, then finish(), and waits for the others.
  template <typename Body, typename Finish>
  void share(int64_t count, int64_t grain, const Body& body, const Finish& finish) {
    for (int64_t first = take(grain); first < count; first = take(grain)) body(first, std::min(count, first + grain));
    finish();
    wait();
  }

  template <typename Body>
  void share(int64_t count, int64_t grain, const Body& body) {
    share(count, grain, body, [] {});
  }

 private:
  // A thread that waits longer than this has lost its neighbour's core to another process: let that one run.
  static constexpr int64_t kSpins = 1000;

  int64_t take(int64_t grain) { return next_.fetch_add(grain, std::memory_order_relaxed); }

  void wait() {
    const int64_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_.load(std::memory_order_relaxed)) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int64_t spins = 0; round_.load(std::memory_order_acquire) == round; spins++) {
      if (spins < kSpins) {
        _mm_pause();
      } else {
        sched_yield();
      }
    }
  }

  std::atomic<int64_t> size_{1};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> arrived_{0};
  alignas(64) std::atomic<int64_t> round_{0};
};

// Runs body(team) on every thread of this process's pool. The body must not throw.
template <typename Body>
void run_team(const Body& body) {
  const int64_t size = at::get_num_threads();
  Team team;
  if (size == 1) return body(team);
#pragma omp parallel num_threads(size)
  {
    team.join();
    body(team);
  }
}

}  // namespace millrace
