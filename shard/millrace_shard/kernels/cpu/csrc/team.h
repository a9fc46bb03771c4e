// The threads of one operator call, which synchronise without leaving their parallel region.
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

// Units of work that the process's threads have taken: a sign of life within an operator, and no exact count, since
// threads of two operators at a time may share a counter. Each is on a cache line of its own.
class UnitsTaken {
 public:
  static void add(int64_t thread) {
    std::atomic<int64_t>& count = counts_[thread % kCounts].units;
    count.store(count.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }

  static int64_t sum() {
    int64_t sum = 0;
    for (const Count& count : counts_) sum += count.units.load(std::memory_order_relaxed);
    return sum;
  }

 private:
  // Zero, as all static memory is at first.
  struct alignas(64) Count {
    std::atomic<int64_t> units;
  };
  static constexpr int64_t kCounts = 64;
  static inline Count counts_[kCounts];
};

class Team {
 public:
  // A team of at most `wanted` threads. A thread may have one team at a time.
  explicit Team(int64_t wanted) {
    static thread_local std::vector<Taken> kept;
    if (static_cast<int64_t>(kept.size()) < 2 * wanted) kept = std::vector<Taken>(2 * wanted);
    taken_ = kept.data();
    for (int64_t i = 0; i < 2 * wanted; i++) taken_[i].units.store(0, std::memory_order_relaxed);
  }

  // Each thread calls this first: the runtime may have granted fewer threads than `wanted`.
  void join() { size_.store(omp_get_num_threads(), std::memory_order_relaxed); }

  int64_t size() const { return size_.load(std::memory_order_relaxed); }

  // Calls body(first, last) for parts of [0, count) until all are taken, then finish(), then waits for the other
  // threads. Every thread passes the same count and grain.
  //
  // Each thread works through a range from its front, so that its reads are contiguous. A thread that has finished its
  // range takes units from the back of other ranges.
  template <typename Body, typename Finish>
  void share(int64_t count, int64_t grain, const Body& body, const Finish& finish) {
    const int64_t units = (count + grain - 1) / grain, size = this->size(), self = index();
    const int64_t round = round_.load(std::memory_order_acquire);
    Taken* const now = taken_ + round % 2 * size;
    taken_[(round + 1) % 2 * size + self].units.store(0, std::memory_order_relaxed);
    for (int64_t turn = 0; turn < size; turn++) {
      const int64_t owner = (self + turn) % size;
      const Range range = part(units, owner);
      for (int64_t unit; (unit = now[owner].take(range, turn == 0)) >= 0;) {
        body(unit * grain, std::min(count, (unit + 1) * grain));
        UnitsTaken::add(self);
      }
    }
    finish();
    wait(round, size);
  }

  template <typename Body>
  void share(int64_t count, int64_t grain, const Body& body) {
    share(count, grain, body, [] {});
  }

 private:
  // After this many spins the core of a missing thread probably runs another process, so the waiting thread yields.
  static constexpr int64_t kSpins = 1000;

  // Counts of the units taken from a thread's range: the low half counts from the front (by the thread), the high half
  // from the back (by other threads).
  struct alignas(64) Taken {
    std::atomic<uint64_t> units{0};

    // A unit of `range`, or -1 if all are taken.
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
  Taken* taken_;  // two per thread: this round's and the next round's
  alignas(64) std::atomic<int64_t> arrived_{0};
  alignas(64) std::atomic<int64_t> round_{0};
};

// Runs body(team) on every thread of the process's pool. The body must not throw.
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
