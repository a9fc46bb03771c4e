// LoRA adapters of single rows beside a product by tiles: shrink, x A^T of each row, and expand, whose deltas join the
// sums of the product before these are stored.
//
// A row's bits depend on the row and its adapter alone. The delta of a slice is summed from zero, its even and its odd
// ranks apart, and is added to the sums of the product in one operation. The tile unit does so (Intel SDM, TDPBF16PS),
// and vectors repeat its order, so that both give the same bits: rows of a tile that have one adapter go through the
// tile unit, and other rows through vectors. Sums of rows without an adapter are left alone.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "packed_weight.h"

namespace millrace {

constexpr int64_t kRanks = 16;                          // of a slice
constexpr int64_t kExpandTile = kRanks * tiles::kColumns;  // bfloat16 values: 8 pairs of ranks, 16 outputs
constexpr int64_t kMostParts = 3;
constexpr int64_t kMostSlices = 1024;
// The tile unit flushes denormal numbers to zero and vectors do not. Without smaller factors, no product, sum of
// products or sum with them is denormal.
constexpr float kSmallestFactor = 0x1p-40f;

// One row of the table of adapters: the weights of one adapter for one module. See pack_lora_a and pack_lora_b.
struct LoraModule {
  const BFloat16 *a, *b;
  const float *factors, *bias;  // the bias may be null
  int64_t slices;               // 0 if the adapter does not target the module
};
constexpr int64_t kModuleFields = 5;
static_assert(sizeof(LoraModule) == kModuleFields * sizeof(int64_t));

// The adapters of a step's rows. Modules are numbered as in the table.
class Adapters {
 public:
  // Rows of one tile of 16 rows with one adapter.
  struct Job {
    int64_t tile;
    int32_t slot;
  };
  static constexpr int32_t kMixed = -1;
  static constexpr int64_t kMostLines = 64;

  // `rows` [count] int32 holds the adapter slot of each row, 0 for none; `table` [slots, modules, 5] int64 holds the
  // fields of LoraModule. Modules [first, first + used) are read. Without `rows`, no row has an adapter.
  Adapters(const std::optional<at::Tensor>& rows, const std::optional<at::Tensor>& table, int64_t first, int64_t used,
           int64_t count) {
    if (!rows.has_value() || rows->numel() == 0) return;
    TORCH_CHECK(table.has_value() && rows->scalar_type() == at::kInt && rows->is_contiguous(),
                "millrace: adapter slots and their table belong together");
    TORCH_CHECK(rows->dim() == 1 && rows->numel() == count, "millrace: not one adapter slot per row");
    TORCH_CHECK(table->scalar_type() == at::kLong && table->is_contiguous() && table->dim() == 3 &&
                    table->size(2) == kModuleFields,
                "millrace: not a table of adapters");
    modules_ = table->size(1);
    TORCH_CHECK(first >= 0 && used <= modules_ - first, "millrace: the table of adapters lacks modules");
    slots_ = rows->const_data_ptr<int32_t>();
    table_ = reinterpret_cast<const LoraModule*>(table->const_data_ptr<int64_t>());
    plan(count, table->size(0));
    const int64_t slices = check(first, used);
    for (int64_t row = 0; row < count; row++) {
      const bool is_early = is_early_tile(row / tiles::kRows);
      const bool is_biased = has_bias(slots_[row], first, used);
      any_bias_ = any_bias_ || is_biased;
      late_.push_back(is_early && !is_biased ? 0 : slots_[row]);
      line_.push_back(lines_);
      if (slots_[row] != 0 && !is_early) lines_++;
    }
    count_ = round_up(count, tiles::kRows);
    slices_ = slices;
    if (slices == 0) slots_ = nullptr;
    static thread_local Scratch scratch;
    const int64_t states = kMostParts * slices * count_ * kRanks;
    char* memory = scratch.reserve(states * (sizeof(float) + sizeof(BFloat16)));
    wide_ = reinterpret_cast<float*>(memory);
    states_ = reinterpret_cast<BFloat16*>(wide_ + states);
  }

  // Whether any row has an adapter that targets one of the modules.
  bool any() const { return slots_ != nullptr; }

  // Whether any row has an adapter for one of `count` modules.
  bool target(int64_t first, int64_t count) const {
    return std::any_of(used_.begin(), used_.end(), [&](int32_t slot) {
      const LoraModule* const begin = &module(slot, first);
      return std::any_of(begin, begin + count, [](const LoraModule& each) { return each.slices > 0; });
    });
  }

  int32_t slot(int64_t row) const { return slots_[row]; }
  const LoraModule& module(int64_t slot, int64_t index) const { return table_[slot * modules_ + index]; }
  const Job& job(int64_t index) const { return jobs_[index]; }
  // The jobs of tiles [begin, end).
  Range jobs(int64_t begin, int64_t end) const { return {first_job_[begin], first_job_[end]}; }
  // The slot of all rows of a tile, or kMixed.
  int32_t common_slot(int64_t tile) const { return common_[tile]; }
  // Whether the tile unit adds the deltas of a tile.
  bool is_early_tile(int64_t tile) const { return tiles::on_amx() && common_[tile] > 0; }
  // The slot of a row if its sums change after they have left the tile unit, else 0.
  const int32_t* late_slots() const { return late_.data(); }

  // Makes room for the deltas of a linear with `width` outputs, if few rows need it. Their weights are then read once,
  // from end to end, and not with each panel, in as many places as there are adapters.
  void reserve_deltas(int64_t width) {
    if (lines_ > kMostLines) return;
    static thread_local Scratch scratch;
    width_ = std::max(width_, round_up(width, kPanelColumns));
    deltas_ = reinterpret_cast<float*>(scratch.reserve(slices_ * lines_ * width_ * sizeof(float)));
  }
  bool keeps_deltas() const { return deltas_ != nullptr; }
  bool any_bias() const { return any_bias_; }
  int64_t slices() const { return slices_; }
  // The deltas of one slice for a row of a tile that is not early; -0 where there is none, which changes no sum.
  float* deltas(int64_t slice, int64_t row) const { return deltas_ + (slice * lines_ + line_[row]) * width_; }

  // Where the result of the shrink of one row and slice is, in bfloat16 and, of equal value, in float32.
  int64_t place(int64_t part, int64_t slice, int64_t row) const {
    return ((part * slices_ + slice) * count_ + row) * kRanks;
  }
  int64_t slice_stride() const { return count_ * kRanks; }
  BFloat16* states() const { return states_; }
  float* wide() const { return wide_; }

 private:
  // Plans the jobs, tile by tile.
  void plan(int64_t count, int64_t slots) {
    const int64_t tiles = (count + tiles::kRows - 1) / tiles::kRows;
    for (int64_t tile = 0; tile < tiles; tile++) {
      first_job_.push_back(static_cast<int64_t>(jobs_.size()));
      const int64_t begin = tile * tiles::kRows, end = std::min(count, begin + tiles::kRows);
      common_.push_back(slots_[begin]);
      for (int64_t row = begin; row < end; row++) {
        const int32_t slot = slots_[row];
        TORCH_CHECK(slot >= 0 && slot < slots, "millrace: adapter slot out of range");
        if (slot != common_.back()) common_.back() = kMixed;
        if (slot != 0 && std::find(slots_ + begin, slots_ + row, slot) == slots_ + row) jobs_.push_back({tile, slot});
      }
    }
    first_job_.push_back(static_cast<int64_t>(jobs_.size()));
    for (const Job& job : jobs_) used_.push_back(job.slot);
    std::sort(used_.begin(), used_.end());
    used_.erase(std::unique(used_.begin(), used_.end()), used_.end());
  }

  bool has_bias(int64_t slot, int64_t first, int64_t used) {
    if (slot == biased_slot_) return is_biased_;
    biased_slot_ = slot;
    const LoraModule* const begin = &module(slot, first);
    return is_biased_ = std::any_of(begin, begin + used, [](const LoraModule& each) { return each.bias != nullptr; });
  }

  // Checks the modules of all slots in use; returns the largest number of slices.
  int64_t check(int64_t first, int64_t used) const {
    int64_t most = 0;
    for (const int32_t slot : used_)
      for (int64_t index = first; index < first + used; index++) {
        const LoraModule& each = module(slot, index);
        TORCH_CHECK(each.slices >= 0 && each.slices <= kMostSlices, "millrace: slices of an adapter out of range");
        TORCH_CHECK(each.slices == 0 || (each.a != nullptr && each.b != nullptr && each.factors != nullptr),
                    "millrace: an adapter without weights");
        most = std::max(most, each.slices);
      }
    return most;
  }

  const int32_t* slots_ = nullptr;
  const LoraModule* table_ = nullptr;
  int64_t modules_ = 0, count_ = 0, slices_ = 0;
  std::vector<Job> jobs_;
  std::vector<int64_t> first_job_;
  std::vector<int32_t> common_, late_, used_;  // used: the slots of the step
  std::vector<int64_t> line_;
  int64_t lines_ = 0, width_ = 0, biased_slot_ = -1;
  bool is_biased_ = false, any_bias_ = false;
  float* deltas_ = nullptr;
  BFloat16* states_ = nullptr;
  float* wide_ = nullptr;
};

// The even and the odd values of kLanes pairs.
struct Widened {
  Vec even, odd;
};

inline Widened widen(const BFloat16* pairs) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m512i bits = _mm512_loadu_si512(pairs);
  return {Vec(_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16))),
          Vec(_mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(0xffff0000))))};
#else
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs));
  return {Vec(_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16))),
          Vec(_mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(0xffff0000))))};
#endif
}

// Fetches as many values of an adapter as `size`, a short distance ahead of `from`: an adapter's weights follow each other
// in the order of their use, but each is too short for the CPU's own prefetching.
inline void fetch_after(const BFloat16* from, int64_t size) {
  constexpr int64_t kAhead = 8192 / sizeof(BFloat16);
  for (int64_t i = 0; i < size; i += 64 / sizeof(BFloat16))
    asm volatile("prefetcht1 %0" : : "m"(from[kAhead + i]));
}

// result [16] = x A^T of one slice, for a row of left tiles `x` with `steps` steps of K.
inline void shrink_row(float* result, const BFloat16* x, const BFloat16* a, int64_t steps) {
#if defined(CPU_CAPABILITY_AVX512)
  __m512 totals[4] = {};
  for (int64_t step = 0; step < steps; step++, x += tiles::kTile, a += tiles::kTile) {
    fetch_after(a, tiles::kTile);
#pragma GCC unroll 16
    for (int pair = 0; pair < tiles::kDepth / 2; pair++)
      totals[pair % 4] = avx512::add_products(
          totals[pair % 4], avx512::load_left(x + 2 * pair),
          _mm512_loadu_si512(a + 2 * pair * tiles::kColumns));
  }
  _mm512_storeu_ps(result, _mm512_add_ps(_mm512_add_ps(totals[0], totals[1]), _mm512_add_ps(totals[2], totals[3])));
#else
  for (int64_t i = 0; i < kRanks; i += kLanes) {
    Vec totals[4] = {Vec(0.f), Vec(0.f), Vec(0.f), Vec(0.f)};
    const BFloat16 *left = x, *right = a + 2 * i;
    for (int64_t step = 0; step < steps; step++, left += tiles::kTile, right += tiles::kTile) {
      if (i == 0) fetch_after(right, tiles::kTile);
#pragma GCC unroll 16
      for (int pair = 0; pair < tiles::kDepth / 2; pair++) {
        const Widened values = widen(right + 2 * pair * tiles::kColumns);
        Vec* const total = totals + pair % 2 * 2;
        total[0] = at::vec::fmadd(Vec(static_cast<float>(left[2 * pair])), values.even, total[0]);
        total[1] = at::vec::fmadd(Vec(static_cast<float>(left[2 * pair + 1])), values.odd, total[1]);
      }
    }
    save(result + i, (totals[0] + totals[1]) + (totals[2] + totals[3]));
  }
#endif
}

// kLanes columns of B of one slice.
class ExpandTile {
 public:
  explicit ExpandTile(const BFloat16* b) {
#pragma GCC unroll 8
    for (int64_t pair = 0; pair < kPairs; pair++) values_[pair] = widen(b + 2 * pair * tiles::kColumns);
  }

  // The deltas of a row, from its `states` [16].
  Vec operator()(const float* states) const {
    Vec even(0.f), odd(0.f);
#pragma GCC unroll 8
    for (int64_t pair = 0; pair < kPairs; pair++) {
      even = at::vec::fmadd(Vec(states[2 * pair]), values_[pair].even, even);
      odd = at::vec::fmadd(Vec(states[2 * pair + 1]), values_[pair].odd, odd);
    }
    return even + odd;
  }

 private:
  static constexpr int64_t kPairs = kRanks / 2;
  Widened values_[kPairs];
};

}  // namespace millrace
