// Memory for packed weights: large mappings that weights share, on huge pages where the system has them.
//
// A weight of a small model is smaller than a huge page. An allocation per weight would lie on pages of 4 KiB, and the
// hardware prefetcher and the TLB start anew at the end of each page.
#pragma once

#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <utility>

#include "vectors.h"

namespace millrace {

class WeightMemory {
 public:
  // An uninitialised, contiguous tensor. A mapping is freed with the last tensor in it.
  static at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
    const int64_t bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(options.dtype().itemsize());
    static WeightMemory memory;
    const std::lock_guard<std::mutex> lock(memory.mutex_);
    const int64_t taken = round_up(std::max<int64_t>(bytes, 1), kLine);
    const std::shared_ptr<void> mapping = memory.with_room(taken);
    memory.left_ -= taken;
    return at::from_blob(std::exchange(memory.next_, memory.next_ + taken), sizes, [mapping](void*) {}, options);
  }

 private:
  static constexpr int64_t kLine = 64, kHugePage = int64_t{1} << 21, kMapping = 32 * kHugePage;

  std::shared_ptr<void> with_room(int64_t bytes) {
    std::shared_ptr<void> mapping = mapping_.lock();
    if (mapping != nullptr && bytes <= left_) return mapping;
    left_ = round_up(std::max(bytes, kMapping), kHugePage);
    void* memory = std::aligned_alloc(kHugePage, left_);
    TORCH_CHECK(memory != nullptr, "millrace: out of memory");
    madvise(memory, left_, MADV_HUGEPAGE);  // if the system refuses, small pages serve
    mapping = std::shared_ptr<void>(memory, std::free);
    mapping_ = mapping;
    next_ = static_cast<char*>(memory);
    return mapping;
  }

  std::mutex mutex_;
  std::weak_ptr<void> mapping_;
  char* next_ = nullptr;
  int64_t left_ = 0;
};

}  // namespace millrace
