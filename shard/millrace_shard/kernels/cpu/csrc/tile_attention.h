// The attention of attention.h in bfloat16 by tiles, for head dims that are multiples of 32.
//
// The absolute grid of key chunks and the order of every sum are the same, and so is the invariance.
#pragma once

#include "tile_unit.h"

#include "attention.h"
#include "team.h"

namespace millrace {

constexpr int64_t kPageTiles = kPage / tiles::kDepth;
constexpr int64_t kRowsTogether = 32;
constexpr float kLog2E = 1.442695040888963f;

// Working memory of one tile of queries. A row is a pair of a token and a query head of the group.
struct TileWorkspace {
  int64_t rows, dim;
  float *scores, *sums, *row_max, *row_sum;
  tiles::Tiled queries{nullptr, 0}, weights{nullptr, 0};

  TileWorkspace(Scratch& scratch, const Attention<BFloat16>& a)
      : rows(round_up(a.tile_tokens() * a.group(), 2 * tiles::kRows)), dim(a.pages.dim) {
    const int64_t floats = rows * (kChunk + dim + 2);
    const int64_t tiled = tiles::Tiled::bytes(rows, dim);
    char* data = scratch.reserve(floats * sizeof(float) + tiled + tiles::Tiled::bytes(rows, kChunk));
    scores = reinterpret_cast<float*>(data);
    sums = scores + rows * kChunk;
    row_max = sums + rows * dim;
    row_sum = row_max + rows;
    queries = tiles::Tiled(reinterpret_cast<char*>(row_sum + rows), dim);
    weights = tiles::Tiled(reinterpret_cast<char*>(queries.data) + tiled, kChunk);
  }

  // The address of a row's sum for `column`; sums up to the next multiple of 16 follow it.
  float* sum(int64_t row, int64_t column) const {
    return sums + (row / tiles::kRows * (dim / tiles::kColumns) + column / tiles::kColumns) * tiles::kSums +
           row % tiles::kRows * tiles::kColumns + column % tiles::kColumns;
  }
};

// Turns scores[low, high) of a chunk, if any, into weights [0, n) and rescales the sums of the row so far.
inline void softmax_row(const Attention<BFloat16>& a, const TileWorkspace& w, int64_t row, Range seen, int64_t n) {
  constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
  float* scores = w.scores + row * kChunk;
  if (seen.low >= seen.high) seen = {n, n};
  const int64_t low = round_down(seen.low, tiles::kDepth), high = round_up(seen.high, tiles::kDepth);
  for (int64_t i = 0; i < low; i += tiles::kDepth) std::memset(w.weights.at(row, i), 0, tiles::kTileStride);
  for (int64_t i = high; i < n; i += tiles::kDepth) std::memset(w.weights.at(row, i), 0, tiles::kTileStride);

  if (low == high) return;

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
    save(w.weights.at(row, i), even, odd);
  }
  const float keep = first(kept);
  w.row_sum[row] = w.row_sum[row] * keep + sum(total + total_odd);
  w.row_max[row] = now;
  if (keep != 1.f)
    for (int64_t i = 0; i < w.dim; i += kLanes) save(w.sum(row, i), load(w.sum(row, i)) * kept);
}

// A chunk of keys of a tile of queries.
struct Chunk {
  Tile tile;
  int64_t begin, end;  // the keys that the tile's last query sees

  // The number of keys that are read: those that any query sees, rounded up to whole tiles.
  int64_t size() const { return std::min(kChunk, round_up(end - begin, tiles::kDepth)); }
  int64_t num_pages() const { return (size() + kPage - 1) / kPage; }
  bool is_last() const { return begin + kChunk >= end; }
};

inline Chunk first_chunk(const Attention<BFloat16>& a, const Tile& tile) {
  const int64_t before = a.contexts[tile.sequence] - (a.starts[tile.sequence + 1] - a.starts[tile.sequence]);
  const int64_t oldest = a.window > 0 ? std::max<int64_t>(0, before + tile.first - a.window + 1) : 0;
  return {tile, round_down(oldest, kChunk), before + tile.last};
}

// Prefetches the pages of the next chunk while the current one is computed, a few lines at a time: many at once would
// delay the loads of the current chunk.
class Ahead {
 public:
  explicit Ahead(const Attention<BFloat16>& a) : a_(a), page_bytes_(kPage * a.pages.dim * sizeof(BFloat16)) {}

  void expect(const Chunk& chunk) {
    const int32_t* table = a_.tables + chunk.tile.sequence * a_.table_width + chunk.begin / kPage;
    const int64_t pages = chunk.num_pages();
    for (int64_t page = 0; page < pages; page++) {
      const int64_t at = a_.pages.offset(table[page], chunk.tile.head);
      pages_[page] = reinterpret_cast<const char*>(a_.keys + at);
      pages_[pages + page] = reinterpret_cast<const char*>(a_.values + at);
    }
    page_ = next_ = 0;
    count_ = 2 * pages;
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
  const Attention<BFloat16>& a_;
  const int64_t page_bytes_;
  const char* pages_[2 * kChunkPages] = {};
  int64_t page_ = 0, count_ = 0, next_ = 0;
};

// Multiplies up to 32 rows from `row` on with `width` tiles of columns.
inline void multiply_rows(const tiles::Tiled& left, int64_t row, int64_t rows, int64_t width, const tiles::Right& right,
                          const tiles::Sums& sums, int64_t low, bool add, Ahead& ahead) {
  const BFloat16* from = left.rows(row);
  tiles::multiply_pages(from, from + left.stride * tiles::kTile, rows, width, right, sums, sums.data + low, add,
                        [&] { ahead.fetch(); });
}

// The pages of a chunk of keys.
struct ChunkPages {
  const BFloat16 *keys[kChunkPages], *values[kChunkPages];
  int64_t size, count;

  ChunkPages(const Attention<BFloat16>& a, const Chunk& chunk) : size(chunk.size()), count(chunk.num_pages()) {
    const int32_t* table = a.tables + chunk.tile.sequence * a.table_width + chunk.begin / kPage;
    for (int64_t page = 0; page < count; page++) {
      const int64_t at = a.pages.offset(table[page], chunk.tile.head);
      keys[page] = a.keys + at;
      values[page] = a.values + at;
    }
  }
};

inline void score_rows(const TileWorkspace& w, const ChunkPages& pages, int64_t row, int64_t rows, Ahead& ahead) {
  constexpr int64_t stride = kPage * 2 * sizeof(BFloat16);
  const int64_t steps = w.dim / tiles::kDepth, width = tiles::page_width(rows);
  for (int64_t key = 0; key < pages.size; key += width * tiles::kColumns) {
    const BFloat16* run = pages.keys[key / kPage] + key % kPage * 2;
    const tiles::Right right{&run, steps, steps, tiles::kRows * kPage * 2, tiles::kColumns * 2, stride};
    const tiles::Sums to{w.scores + row * kChunk + key, tiles::kColumns, kChunk * sizeof(float)};
    multiply_rows(w.queries, row, rows, width, right, to, tiles::kRows * kChunk, false, ahead);
  }
}

inline void sum_values(const TileWorkspace& w, const ChunkPages& pages, int64_t row, int64_t rows, Ahead& ahead) {
  int64_t width = tiles::page_width(rows);
  for (int64_t column = 0; column < w.dim; column += width * tiles::kColumns) {
    if (column + width * tiles::kColumns > w.dim) width = 2;
    const BFloat16* runs[kChunkPages];
    for (int64_t page = 0; page < pages.count; page++) runs[page] = pages.values[page] + column * 2;
    const tiles::Right right{runs, pages.size / tiles::kDepth, kPageTiles, tiles::kRows * w.dim * 2,
                             tiles::kColumns * 2, w.dim * 2 * static_cast<int64_t>(sizeof(BFloat16))};
    const tiles::Sums to{w.sum(row, column), tiles::kSums, tiles::kColumns * sizeof(float)};
    multiply_rows(w.weights, row, rows, width, right, to, w.dim / tiles::kColumns * tiles::kSums, true, ahead);
  }
}

inline void attend_chunk(const Attention<BFloat16>& a, const TileWorkspace& w, const Chunk& chunk, Ahead& ahead) {
  const Tile& tile = chunk.tile;
  const int64_t group = a.group(), rows = (tile.last - tile.first) * group;
  const int64_t before = chunk.end - tile.last, n = chunk.size();
  const ChunkPages pages(a, chunk);
  for (int64_t first = 0; first < rows; first += kRowsTogether) {
    const int64_t last = std::min(rows, first + kRowsTogether);
    for (int64_t row = first; row < last; row += 2 * tiles::kRows)
      score_rows(w, pages, row, std::min(2 * tiles::kRows, last - row), ahead);
    for (int64_t row = first; row < last; row++) {
      const int64_t position = before + tile.first + row / group;
      const int64_t oldest = a.window > 0 ? std::max<int64_t>(0, position - a.window + 1) : 0;
      softmax_row(a, w, row, {std::max<int64_t>(0, oldest - chunk.begin), std::min(n, position + 1 - chunk.begin)}, n);
    }
    for (int64_t row = first; row < last; row += 2 * tiles::kRows)
      sum_values(w, pages, row, std::min(2 * tiles::kRows, last - row), ahead);
  }
}

// Attends the tile of queries that starts with `chunk`; `next` is the tile after it. place(token, column) is the
// address of an output.
template <typename Place>
void attend_tile(const Attention<BFloat16>& a, const TileWorkspace& w, Chunk chunk, const Chunk* next, Ahead& ahead,
                 int64_t& configured, const Place& place) {
  const Tile& tile = chunk.tile;
  const int64_t dim = w.dim, group = a.group(), start = a.starts[tile.sequence];
  const int64_t rows = (tile.last - tile.first) * group;
  const auto out = [&](int64_t row, int64_t column) {
    return place(start + tile.first + row / group, (tile.head * group + row % group) * dim + column);
  };
  for (int64_t row = 0; row < rows; row++)
    for (int64_t column = 0; column < dim; column += tiles::kDepth) {
      std::memcpy(w.queries.at(row, column),
                  a.queries + (start + tile.first + row / group) * a.query_stride +
                      (tile.head * group + row % group) * dim + column,
                  tiles::kDepth * sizeof(BFloat16));
      // Other cores read the last layer's outputs there. A store that waits for them delays later stores and tile
      // loads.
      __builtin_prefetch(out(row, column), 1);
    }
  start_rows(a, tile, rows, kLog2E, w.row_max, w.row_sum);
  std::fill_n(w.sums, round_up(rows, tiles::kRows) * dim, 0.f);

  if (const int64_t tile_rows = std::min(rows, tiles::kRows); tile_rows != configured) {
    tiles::configure(tile_rows);
    configured = tile_rows;
  }
  for (bool is_last = false; !is_last; chunk.begin += kChunk) {
    is_last = chunk.is_last();
    // Where computation dominates, prefetching costs more than it saves.
    if (rows <= tiles::kRows && (!is_last || next != nullptr))
      ahead.expect(is_last ? *next : Chunk{tile, chunk.begin + kChunk, chunk.end});
    attend_chunk(a, w, chunk, ahead);
  }

  for (int64_t row = 0; row < rows; row++) {
    const Vec inverse(1.f / w.row_sum[row]);
    for (int64_t column = 0; column < dim; column += kLanes)
      save(out(row, column), load(w.sum(row, column)) * inverse);
  }
}

// Attends all tiles. prepare(tile) is called before the tile is read.
template <typename Place, typename Prepare>
void attend_tiles(Team& team, const Attention<BFloat16>& a, const std::vector<Tile>& tiles, const Place& place,
                  const Prepare& prepare) {
  static thread_local Scratch scratch;
  const TileWorkspace workspace(scratch, a);
  Ahead ahead(a);
  const Tile* next = nullptr;
  int64_t configured = 0;
  // A tile is attended when the next one is known.
  const auto attend_before = [&](const Tile* after) {
    if (next == nullptr) return;
    prepare(*next);
    const Chunk chunk = first_chunk(a, *next), then = after == nullptr ? chunk : first_chunk(a, *after);
    attend_tile(a, workspace, chunk, after == nullptr ? nullptr : &then, ahead, configured, place);
  };
  team.share(
      static_cast<int64_t>(tiles.size()), 1,
      [&](int64_t begin, int64_t) {
        attend_before(&tiles[begin]);
        next = &tiles[begin];
      },
      [&] { attend_before(nullptr); });
  tiles::release();
}

inline void attend_by_tiles(const Attention<BFloat16>& a) {
  static thread_local std::vector<Tile> planned;
  plan_tiles(a, planned);
  const std::vector<Tile>& tiles = planned;
  const int64_t width = a.heads * a.pages.dim;
  run_team([&](Team& team) {
    attend_tiles(
        team, a, tiles, [&](int64_t token, int64_t column) { return a.out + token * width + column; },
        [](const Tile&) {});
  });
}

}  // namespace millrace
