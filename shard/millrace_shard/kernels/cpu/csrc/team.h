// The threads of one operator call, in step with one another without leaving their parallel region.
#pragma once

#include <ATen/Parallel.h>
#include <immintrin.h>
#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "vectors.h"

namespace millrace {

class Team {
 public:
  // Of at most `wanted` threads. One at a time for each thread that starts them.
  explicit Team(int64_t wanted) {
    static thread_local std::vector<Taken> kept;
    if (static_cast<int64_t>(kept.size()) < 2 * wanted) kept = std::vector<Taken>(2 * wanted);
    taken_ = kept.data();
    for (int64_t i = 0; i < 2 * wanted; i++) taken_[i].units.store(0, std::memory_order_relaxed);
  }

  // To be called by each thread before anything else: the runtime may have granted fewer threads than were wanted.
  void join() { size_.store(omp_get_num_threads(), std::memory_order_relaxed); }

  int64_t size() const { return size_.load(std::memory_order_relaxed); }

  // Calls body(first, last) for parts of [0, count) until all are taken, then finish(), and waits for the others. Every
  // thread has to name the same count and grain.
  //
  // Each thread has a range of its own, which it goes through from the front, so that what it reads lies together;
  // who is done takes from the back of the others'.
  template <typename Body, typename Finish>
  void share(int64_t count, int64_t grain, const Body& body, const Finish& finish) {
    const int64_t units = (count + grain - 1) / grain, size = this->size(), self = index();
    const int64_t round = round_.load(std::memory_order_acquire);
    Taken* const now = taken_ + round % 2 * size;
    taken_[(round + 1) % 2 * size + self].units.store(0, std::memory_order_relaxed);
    for (int64_t turn = 0; turn < size; turn++) {
      const int64_t owner = (self + turn) % size;
      const Range range = part(units, owner);
      for (int64_t unit; (unit = now[owner].take(range, turn == 0)) >= 0;)
        body(unit * grain, std::min(count, (unit + 1) * grain));
    }
    finish();
    wait(round, size);
  }

  template <typename Body>
  void share(int64_t count, int64_t grain, const Body& body) {
    share(count, grain, body, [] {});
  }

 private:
  // A thread that waits longer than this has lost its neighbour's core to another process: let that one run.
  static constexpr int64_t kSpins = 1000;

  // Units of a thread's range that are taken: by itself from the front, in the low half, by others from the back.
  struct alignas(64) Taken {
    std::atomic<uint64_t> units{0};

    // One of `range`, or -1.
    int64_t take(Range range, bool is_own) {
      const uint64_t before = units.fetch_add(is_own ? 1 : uint64_t{1} << 32, std::memory_order_relaxed);
      const int64_t front = static_cast<uint32_t>(before), back = static_cast<int64_t>(before >> 32);
      if (front + back >= range.high - range.low) return -1;
      return is_own ? range.low + front : range.high - 1 - back;
    }
  };

  int64_t index() const { return size() == 1 ? 0 : omp_get_thread_num(); }

  Range part(int64_t units, int64_t owner) const { return {units * owner / size(), units * (owner + 1) / size()}; }

  void wait(int64_t round, int64_t size) {
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived_.store(0, std::memory_order_relaxed);
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
  Taken* taken_;  // two to a thread: those of this round, and of the next
  alignas(64) std::atomic<int64_t> arrived_{0};
  alignas(64) std::atomic<int64_t> round_{0};
};

// Runs body(team) on every thread of this process's pool. The body must not throw.
template <typename Body>
void run_team(const Body& body) {
  const int64_t size = at::get_num_threads();
  Team team(size);
  if (size == 1) return body(team);
#pragma omp parallel num_threads(size)
  {
    team.join();
    body(team);
  }
}

}  // namespace millrace
