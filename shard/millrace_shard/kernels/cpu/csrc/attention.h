// Ragged causal attention over the paged cache, with online softmax over key chunks.
//
// Chunks start at multiples of kChunk from position 0, whatever the window, tile or batch, and every sum runs in the
// order of positions, so the bits of a row depend on its position and keys alone. Keys that a row does not see get
// weight 0. Pages must be finite for that, so blocks are zeroed before their first use.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "block_product.h"
#include "pages.h"

namespace millrace {

constexpr int64_t kChunkPages = 4;
constexpr int64_t kChunk = kChunkPages * kPage;
constexpr int64_t kTileRows = 64;
// A thread handles about this many pages in the time that waking another thread takes.
constexpr int64_t kGrainPages = 8;

template <typename T>
struct Attention {
  T* out;
  const T* queries;
  const int32_t* tables;
  const int32_t* starts;
  const int32_t* contexts;
  Pages pages;
  int64_t sequences, heads, query_stride, table_width;
  int64_t window;  // 0 for none
  float scale, softcap;  // of products with keys as they are stored; softcap 0 for none
  const float* sinks = nullptr;  // scores of the heads that have no value, or null
  const int32_t* key_ends = nullptr;  // of each query, which rise within a sequence; null: each ends with its own key

  // The end of the keys that query `token` of the step sees, at `position` of its sequence.
  int64_t key_end(int64_t token, int64_t position) const {
    return key_ends == nullptr ? position + 1 : key_ends[token];
  }
  int64_t group() const { return heads / pages.heads; }
  int64_t tile_tokens() const { return std::max<int64_t>(1, kTileRows / group()); }
};

// Query tokens [first, last) of one sequence, with all query heads of one key head.
struct Tile {
  int64_t sequence, head, first, last;
};

// The maximum and the sum of the weights of rows that have seen no key; scores are in units of 1 / `scale`.
template <typename T>
void start_rows(const Attention<T>& a, const Tile& tile, int64_t rows, float scale, float* row_max, float* row_sum) {
  std::fill_n(row_max, rows, -std::numeric_limits<float>::infinity());
  std::fill_n(row_sum, rows, 0.f);
  if (a.sinks == nullptr) return;
  for (int64_t row = 0; row < rows; row++) row_max[row] = a.sinks[tile.head * a.group() + row % a.group()] * scale;
  std::fill_n(row_sum, rows, 1.f);
}

// The scales of the codes of a chunk, in memory of bytes(); null if the cache has none for each position.
struct ChunkScales {
  float *keys = nullptr, *values = nullptr;

  ChunkScales() = default;

  ChunkScales(char* memory, const Pages& pages) {
    if (!pages.has_scales()) return;
    keys = reinterpret_cast<float*>(memory);
    values = keys + kChunk;
  }

  static int64_t bytes() { return 2 * kChunk * static_cast<int64_t>(sizeof(float)); }

  void load(const Pages& pages, const int32_t* blocks, int64_t count, int64_t head) const {
    for (int64_t page = 0; keys != nullptr && page < count; page++) {
      const int64_t at = pages.scale_offset(blocks[page], head);
      std::memcpy(keys + page * kPage, pages.key_scales + at, kPage * sizeof(float));
      std::memcpy(values + page * kPage, pages.value_scales + at, kPage * sizeof(float));
    }
  }
};

// Working memory of bytes() for the pages of a chunk as values of T, or for the values of latents; null without both.
template <typename T>
struct WidenedPages {
  T *keys = nullptr, *values = nullptr;

  WidenedPages() = default;

  WidenedPages(char* memory, const Pages& pages) {
    if (bytes(pages) == 0) return;
    keys = reinterpret_cast<T*>(memory);
    values = keys + (pages.is_latent() ? 0 : kChunk * pages.dim);
  }

  static int64_t bytes(const Pages& pages) {
    const int64_t dims = pages.is_latent() ? pages.value_dim : pages.has_codes() ? 2 * pages.dim : 0;
    return kChunk * dims * static_cast<int64_t>(sizeof(T));
  }

  // Page `index` of the chunk, of keys or values: as it is, or widened into `to` if it has codes.
  const T* page(T* to, void* all, const Pages& pages, int64_t index, int64_t block, int64_t head) const {
    if (!pages.has_codes()) return pages.page<T>(all, block, head);
    T* const widened = to + index * kPage * pages.dim;
    widen_codes(widened, pages.page<uint8_t>(all, block, head), kPage * pages.dim, pages.stored);
    return widened;
  }

  const T* key_page(const Pages& pages, int64_t index, int64_t block, int64_t head) const {
    return page(keys, pages.keys, pages, index, block, head);
  }
  const T* value_page(const Pages& pages, int64_t index, int64_t block, int64_t head) const {
    if (!pages.is_latent()) return page(values, pages.values, pages, index, block, head);
    T* const to = values + index * kPage * pages.value_dim;
    values_of_latents(to, pages.page<T>(pages.keys, block, head), pages.value_dim);
    return to;
  }
};

// Multiplies scores [low, high), multiples of kLanes, by the scales of their keys, if they have any.
inline void scale_scores(float* scores, const float* scales, int64_t low, int64_t high) {
  if (scales == nullptr) return;
  for (int64_t i = low; i < high; i += kLanes) save(scores + i, load(scores + i) * load(scales + i));
}

// The weights of kLanes values from `at` on, multiplied by the scales of the values, if they have any.
inline Vec scaled_weights(const Vec& weights, const float* scales, int64_t at) {
  return scales == nullptr ? weights : weights * load(scales + at);
}

// Working memory of one tile. A row is a pair of a token and a query head of the group.
template <typename T>
struct Workspace {
  int64_t rows, lane_dim;
  float *scores, *sums, *row_max, *row_sum;
  T *weights, *queries;
  WidenedPages<T> widened;
  ChunkScales scales;

  Workspace(Scratch& scratch, const Attention<T>& a)
      : rows(round_up(a.tile_tokens() * a.group(), 16)), lane_dim(round_up(a.pages.value_dim, kLanes)) {
    const int64_t floats = rows * (kChunk + lane_dim + 2);
    const int64_t small = rows * (kChunk + a.pages.dim), wide = WidenedPages<T>::bytes(a.pages);
    char* data = scratch.reserve(floats * sizeof(float) + small * sizeof(T) + wide + ChunkScales::bytes());
    scores = reinterpret_cast<float*>(data);
    sums = scores + rows * kChunk;
    row_max = sums + rows * lane_dim;
    row_sum = row_max + rows;
    weights = reinterpret_cast<T*>(row_sum + rows);
    queries = weights + rows * kChunk;
    char* const rest = reinterpret_cast<char*>(queries + rows * a.pages.dim);
    widened = WidenedPages<T>(rest, a.pages);
    scales = ChunkScales(rest + wide, a.pages);
  }
};

// Turns scores[low, high) of a chunk into weights [0, n) and rescales the sums of the row so far.
template <typename T>
void softmax_row(const Attention<T>& a, const Workspace<T>& w, int64_t row, Range seen, int64_t n) {
  float* scores = w.scores + row * kChunk;
  T* weights = w.weights + row * kChunk;
  const int64_t low = round_down(seen.low, kLanes), high = round_up(seen.high, kLanes);
  std::fill(weights, weights + low, T(0));
  std::fill(weights + high, weights + n, T(0));

  scale_scores(scores, w.scales.keys, low, high);
  float scale = a.scale;
  if (a.softcap > 0.f) {
    const Vec inner(scale / a.softcap), cap(a.softcap);
    for (int64_t i = low; i < high; i += kLanes) save(scores + i, (load(scores + i) * inner).tanh() * cap);
    scale = 1.f;
  }
  constexpr float minus_infinity = -std::numeric_limits<float>::infinity();
  std::fill(scores + low, scores + seen.low, minus_infinity);
  std::fill(scores + seen.high, scores + high, minus_infinity);
  Vec highest(minus_infinity);
  for (int64_t i = low; i < high; i += kLanes) highest = at::vec::maximum(highest, load(scores + i));

  // The fast exponential turns NaN into a large number. The maximum keeps NaN, so the whole row becomes NaN.
  float top = max(highest) * scale;
  if (!std::isfinite(top)) top = std::numeric_limits<float>::quiet_NaN();
  const float before = w.row_max[row];
  const float now = (top > before || std::isnan(top)) ? top : before;
  const float keep = std::exp(before - now);

  Vec total(0.f);
  const Vec scales(scale), shift(now);
  for (int64_t i = low; i < high; i += kLanes) {
    const Vec weight = (load(scores + i) * scales - shift).exp_u20();
    total = total + weight;
    save(weights + i, scaled_weights(weight, w.scales.values, i));
  }
  w.row_sum[row] = w.row_sum[row] * keep + sum(total);
  w.row_max[row] = now;
  if (keep != 1.f) {
    float* sums = w.sums + row * w.lane_dim;
    const Vec factor(keep);
    for (int64_t i = 0; i < w.lane_dim; i += kLanes) save(sums + i, load(sums + i) * factor);
  }
}

template <typename T>
void attend_chunk(const Attention<T>& a, const Workspace<T>& w, const Tile& tile, int64_t chunk, int64_t end) {
  const int64_t dim = a.pages.dim, group = a.group();
  const int64_t used = (tile.last - tile.first) * group, rows = used <= 16 ? used : round_up(used, 16);
  const int64_t before = a.contexts[tile.sequence] - (a.starts[tile.sequence + 1] - a.starts[tile.sequence]);
  const int64_t num_pages = std::min(kChunkPages, (end - chunk + kPage - 1) / kPage);
  const int32_t* table = a.tables + tile.sequence * a.table_width + chunk / kPage;

  w.scales.load(a.pages, table, num_pages, tile.head);
  for (int64_t page = 0; page < num_pages; page++) {
    const T* keys = w.widened.key_page(a.pages, page, table[page], tile.head);
    multiply_block({rows, kPage, dim, dim, kPage, kChunk}, false, w.queries, keys, w.scores + page * kPage);
  }
  for (int64_t row = 0; row < used; row++) {
    const int64_t position = before + tile.first + row / group;
    const int64_t oldest = a.window > 0 ? std::max<int64_t>(0, position - a.window + 1) : 0;
    const int64_t seen_end = a.key_end(a.starts[tile.sequence] + tile.first + row / group, position);
    const Range seen{std::max<int64_t>(0, oldest - chunk), std::min(num_pages * kPage, seen_end - chunk)};
    if (seen.low < seen.high) {
      softmax_row(a, w, row, seen, num_pages * kPage);
    } else {
      std::fill_n(w.weights + row * kChunk, num_pages * kPage, T(0));
    }
  }
  for (int64_t page = 0; page < num_pages; page++) {
    const T* values = w.widened.value_page(a.pages, page, table[page], tile.head);
    multiply_block({rows, a.pages.value_dim, kPage, kChunk, a.pages.value_dim, w.lane_dim}, true,
                   w.weights + page * kPage, values, w.sums);
  }
}

template <typename T>
void attend_tile(const Attention<T>& a, const Workspace<T>& w, const Tile& tile) {
  const int64_t dim = a.pages.dim, group = a.group(), start = a.starts[tile.sequence];
  const int64_t before = a.contexts[tile.sequence] - (a.starts[tile.sequence + 1] - start);
  const int64_t rows = (tile.last - tile.first) * group;
  for (int64_t token = tile.first; token < tile.last; token++)
    std::memcpy(w.queries + (token - tile.first) * group * dim,
                a.queries + (start + token) * a.query_stride + tile.head * group * dim, group * dim * sizeof(T));
  start_rows(a, tile, rows, 1.f, w.row_max, w.row_sum);
  std::fill_n(w.sums, rows * w.lane_dim, 0.f);

  const int64_t end = a.key_end(start + tile.last - 1, before + tile.last - 1);
  const int64_t oldest = a.window > 0 ? std::max<int64_t>(0, before + tile.first - a.window + 1) : 0;
  for (int64_t chunk = round_down(oldest, kChunk); chunk < end; chunk += kChunk) attend_chunk(a, w, tile, chunk, end);

  for (int64_t row = 0; row < rows; row++) {
    const float inverse = a.pages.value_scale() / w.row_sum[row];
    const float* sums = w.sums + row * w.lane_dim;
    const int64_t width = a.pages.value_dim;
    T* to = a.out + ((start + tile.first + row / group) * a.heads + tile.head * group + row % group) * width;
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) save(to + i, load(sums + i) * Vec(inverse));
    for (; i < width; i++) to[i] = static_cast<T>(sums[i] * inverse);
  }
}

// Checks tables [B, width], starts [B + 1] and contexts [B] int32 of sequences with `rows` queries in total.
inline void check_sequences(const at::Tensor& tables, const at::Tensor& starts, const at::Tensor& contexts,
                            int64_t rows) {
  const int64_t count = contexts.numel();
  TORCH_CHECK(starts.is_contiguous() && contexts.is_contiguous() && tables.stride(1) == 1);
  TORCH_CHECK(starts.numel() == count + 1 && tables.size(0) == count);
  const int32_t* start = starts.const_data_ptr<int32_t>();
  TORCH_CHECK(start[0] == 0 && start[count] == rows, "millrace: bad sequence lengths");
}

// The data of key_ends [rows] int32, or null.
inline const int32_t* ends_of(const std::optional<at::Tensor>& key_ends, int64_t rows) {
  if (!key_ends) return nullptr;
  TORCH_CHECK(key_ends->is_contiguous() && key_ends->numel() == rows && key_ends->scalar_type() == at::kInt);
  return key_ends->const_data_ptr<int32_t>();
}

// Fills `tiles`, late tokens first since they have the most keys, and returns the number of pages that they read.
// Throws for lengths and blocks that are out of range; code inside the parallel region must not throw.
template <typename T>
int64_t plan_tiles(const Attention<T>& a, std::vector<Tile>& tiles) {
  const int64_t step = a.tile_tokens();
  int64_t num_pages = 0;
  tiles.clear();
  for (int64_t sequence = a.sequences - 1; sequence >= 0; sequence--) {
    const int64_t tokens = a.starts[sequence + 1] - a.starts[sequence], context = a.contexts[sequence];
    TORCH_CHECK(tokens >= 0 && tokens <= context && context <= a.table_width * kPage, "millrace: bad sequence lengths");
    for (int64_t token = 0; a.key_ends != nullptr && token < tokens; token++) {
      const int64_t at = a.starts[sequence] + token, end = a.key_ends[at];
      TORCH_CHECK(end > context - tokens + token && end <= context && (token == 0 || end >= a.key_ends[at - 1]),
                  "millrace: bad ends of keys");
    }
    for (int64_t page = 0; page * kPage < context; page++) {
      const int32_t block = a.tables[sequence * a.table_width + page];
      TORCH_CHECK(block >= 0 && block < a.pages.blocks, "millrace: block out of range");
    }
    for (int64_t first = tokens == 0 ? -1 : (tokens - 1) / step * step; first >= 0; first -= step) {
      for (int64_t head = 0; head < a.pages.heads; head++)
        tiles.push_back({sequence, head, first, std::min(tokens, first + step)});
      num_pages += a.pages.heads * (context / kPage + 1);
    }
  }
  return num_pages;
}

template <typename T>
void attend_all(const Attention<T>& a) {
  static thread_local std::vector<Tile> planned;
  const int64_t num_pages = plan_tiles(a, planned);
  const std::vector<Tile>& tiles = planned;
  const int64_t count = static_cast<int64_t>(tiles.size());
  const int64_t workers = std::min({static_cast<int64_t>(at::get_num_threads()), count, num_pages / kGrainPages + 1});
  std::atomic<int64_t> next{0};
  at::parallel_for(0, workers, 1, [&](int64_t, int64_t) {
    static thread_local Scratch scratch;
    const Workspace<T> workspace(scratch, a);
    for (int64_t i = next++; i < count; i = next++) attend_tile(a, workspace, tiles[i]);
    release_block_product<T>();
  });
}

}  // namespace millrace
