// Chunks of the keys that a tile of queries sees: their softmax, and the prefetch of their pages.
#pragma once

#include "attention.h"
#include "tiles.h"

namespace millrace {

constexpr float kLog2E = 1.442695040888963f;

// A chunk of keys of a tile of queries.
struct Chunk {
  Tile tile;
  int64_t begin, end;  // the keys that the tile's last query sees
  int64_t first;  // the position of the tile's first query

  // The number of keys that are read: those that any query sees, rounded up to whole tiles.
  int64_t size() const { return std::min(kChunk, round_up(end - begin, tiles::kDepth)); }
  int64_t num_pages() const { return (size() + kPage - 1) / kPage; }
  bool is_last() const { return begin + kChunk >= end; }
  // The pages' numbers.
  const int32_t* blocks(const Attention<BFloat16>& a) const {
    return a.tables + tile.sequence * a.table_width + begin / kPage;
  }
  // The part of the chunk that a row sees.
  Range seen(const Attention<BFloat16>& a, int64_t row) const {
    const int64_t token = row / a.group(), position = first + token;
    const int64_t oldest = a.window > 0 ? std::max<int64_t>(0, position - a.window + 1) : 0;
    const int64_t seen_end = a.key_end(a.starts[tile.sequence] + tile.first + token, position);
    return {std::max<int64_t>(0, oldest - begin), std::min(size(), seen_end - begin)};
  }
};

inline Chunk first_chunk(const Attention<BFloat16>& a, const Tile& tile) {
  const int64_t start = a.starts[tile.sequence], before = a.contexts[tile.sequence] - (a.starts[tile.sequence + 1] - start);
  const int64_t oldest = a.window > 0 ? std::max<int64_t>(0, before + tile.first - a.window + 1) : 0;
  const int64_t end = a.key_end(start + tile.last - 1, before + tile.last - 1);
  return {tile, round_down(oldest, kChunk), end, before + tile.first};
}

// Prefetches the pages of the next chunk while the current one is computed, a few lines at a time: many at once would
// delay the loads of the current chunk.
class Ahead {
 public:
  explicit Ahead(const Attention<BFloat16>& a) : a_(a), page_bytes_(a.pages.page_bytes(sizeof(BFloat16))) {}

  void expect(const Chunk& chunk) {
    const int32_t* table = a_.tables + chunk.tile.sequence * a_.table_width + chunk.begin / kPage;
    const int64_t pages = chunk.num_pages();
    for (int64_t page = 0; page < pages; page++) {
      const int64_t at = a_.pages.scale_offset(table[page], chunk.tile.head) / kPage * page_bytes_;
      pages_[page] = static_cast<const char*>(a_.pages.keys) + at;
      if (!a_.pages.is_latent()) pages_[pages + page] = static_cast<const char*>(a_.pages.values) + at;
      if (a_.pages.has_scales()) fetch_scales(a_.pages.scale_offset(table[page], chunk.tile.head));
    }
    page_ = next_ = 0;
    count_ = a_.pages.is_latent() ? pages : 2 * pages;
  }

  void fetch() {
    if (page_ == count_) return;
    const char* line = pages_[page_] + next_;
    for (const char* stop = line + kBytes; line < stop; line += 64) _mm_prefetch(line, _MM_HINT_T1);
    next_ += kBytes;
    if (next_ == page_bytes_) {
      next_ = 0;
      page_++;
    }
  }

 private:
  // The number of bytes read between two pauses. It divides the size of a page, since heads are multiples of 32 wide.
  static constexpr int64_t kBytes = 2 * tiles::kTile * sizeof(BFloat16) / tiles::kPauses;
  void fetch_scales(int64_t at) const {
    for (const float* scales : {a_.pages.key_scales + at, a_.pages.value_scales + at})
      for (int64_t i = 0; i < kPage; i += 64 / static_cast<int64_t>(sizeof(float)))
        _mm_prefetch(reinterpret_cast<const char*>(scales + i), _MM_HINT_T1);
  }

  const Attention<BFloat16>& a_;
  const int64_t page_bytes_;
  const char* pages_[2 * kChunkPages] = {};
  int64_t page_ = 0, count_ = 0, next_ = 0;
};

// Turns scores[low, high) of a chunk, if any, into weights [0, n) and rescales the sums of the row so far.
template <typename Workspace>
void softmax_chunk(const Attention<BFloat16>& a, const Workspace& w, int64_t row, Range seen, int64_t n) {
  constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
  float* scores = w.scores + row * kChunk;
  if (seen.low >= seen.high) seen = {n, n};
  const int64_t low = round_down(seen.low, tiles::kDepth), high = round_up(seen.high, tiles::kDepth);
  for (int64_t i = 0; i < low; i += tiles::kDepth) w.zero_weights(row, i);
  for (int64_t i = high; i < n; i += tiles::kDepth) w.zero_weights(row, i);

  if (low == high) return;

  scale_scores(scores, w.scales.keys, low, high);
  float scale = a.scale * kLog2E;
  if (a.softcap > 0.f) {
    const Vec inner(a.scale / a.softcap), cap(a.softcap);
    for (int64_t i = low; i < high; i += kLanes) save(scores + i, (load(scores + i) * inner).tanh() * cap);
    scale = kLog2E;
  }
  std::fill(scores + low, scores + seen.low, kMinusInfinity);
  std::fill(scores + seen.high, scores + high, kMinusInfinity);
  Vec highest(kMinusInfinity);
  for (int64_t i = low; i < high; i += kLanes) highest = at::vec::clamp_min(load(scores + i), highest);
  // The maximum may lose a NaN, but the exponential keeps it, so the row's sum and outputs become NaN.
  const float top = max(highest) * scale;
  const float before = w.row_max[row];
  const float now = top > before ? top : before;
  const Vec kept = fast_exp2(Vec(before - now));

  const Vec scales(scale), shift(now);
  Vec total(0.f), total_odd(0.f);
  for (int64_t i = low; i < high; i += 2 * kLanes) {
    const Vec even = fast_exp2(at::vec::fmsub(load(scores + i), scales, shift));
    const Vec odd = fast_exp2(at::vec::fmsub(load(scores + i + kLanes), scales, shift));
    total = total + even;
    total_odd = total_odd + odd;
    w.save_weights(row, i, scaled_weights(even, w.scales.values, i), scaled_weights(odd, w.scales.values, i + kLanes));
  }
  const float keep = first(kept);
  w.row_sum[row] = w.row_sum[row] * keep + sum(total + total_odd);
  w.row_max[row] = now;
  if (keep != 1.f)
    for (int64_t i = 0; i < a.pages.value_dim; i += kLanes) save(w.sum(row, i), load(w.sum(row, i)) * kept);
}

}  // namespace millrace
