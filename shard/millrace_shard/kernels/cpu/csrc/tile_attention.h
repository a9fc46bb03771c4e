// The attention of attention.h in bfloat16 by tiles, for head dims that are multiples of 32.
//
// The absolute grid of key chunks and the order of every sum are the same, and so is the invariance.
#pragma once

#include "chunks.h"
#include "tile_unit.h"

namespace millrace {

constexpr int64_t kPageTiles = kPage / tiles::kDepth;
constexpr int64_t kRowsTogether = 32;

// Working memory of one tile of queries. A row is a pair of a token and a query head of the group.
struct TileWorkspace {
  int64_t rows, dim, value_dim;
  float *scores, *sums, *row_max, *row_sum;
  tiles::Tiled queries{nullptr, 0}, weights{nullptr, 0};
  WidenedPages<BFloat16> widened;
  ChunkScales scales;

  TileWorkspace(Scratch& scratch, const Attention<BFloat16>& a)
      : rows(round_up(a.tile_tokens() * a.group(), 2 * tiles::kRows)), dim(a.pages.dim), value_dim(a.pages.value_dim) {
    const int64_t floats = rows * (kChunk + value_dim + 2);
    const int64_t tiled = tiles::Tiled::bytes(rows, dim), weight_bytes = tiles::Tiled::bytes(rows, kChunk);
    const int64_t wide = WidenedPages<BFloat16>::bytes(a.pages);
    char* data = scratch.reserve(floats * sizeof(float) + tiled + weight_bytes + wide + ChunkScales::bytes());
    scores = reinterpret_cast<float*>(data);
    sums = scores + rows * kChunk;
    row_max = sums + rows * value_dim;
    row_sum = row_max + rows;
    queries = tiles::Tiled(reinterpret_cast<char*>(row_sum + rows), dim);
    weights = tiles::Tiled(reinterpret_cast<char*>(queries.data) + tiled, kChunk);
    char* const rest = reinterpret_cast<char*>(weights.data) + weight_bytes;
    widened = WidenedPages<BFloat16>(rest, a.pages);
    scales = ChunkScales(rest + wide, a.pages);
  }

  // 32 values of a query.
  void load_query(int64_t row, int64_t column, const BFloat16* from) const {
    std::memcpy(queries.at(row, column), from, tiles::kTileStride);
  }
  // 32 weights of a row.
  void zero_weights(int64_t row, int64_t at) const { std::memset(weights.at(row, at), 0, tiles::kTileStride); }
  void save_weights(int64_t row, int64_t at, const Vec& low, const Vec& high) const {
    save(weights.at(row, at), low, high);
  }

  // The address of a row's sum for `column`; sums up to the next multiple of 16 follow it.
  float* sum(int64_t row, int64_t column) const {
    return sums + (row / tiles::kRows * (value_dim / tiles::kColumns) + column / tiles::kColumns) * tiles::kSums +
           row % tiles::kRows * tiles::kColumns + column % tiles::kColumns;
  }
};

// Multiplies up to 32 rows from `row` on with `width` tiles of columns.
inline void multiply_rows(const tiles::Tiled& left, int64_t row, int64_t rows, int64_t width, const tiles::Right& right,
                          const tiles::Sums& sums, int64_t low, bool add, Ahead& ahead) {
  const BFloat16* from = left.rows(row);
  tiles::multiply_pages(from, from + left.stride * tiles::kTile, rows, width, right, sums, sums.data + low, add,
                        [&] { ahead.fetch(); });
}

// The pages of a chunk of keys. Keys and values that are codes are widened when they are first read.
struct ChunkPages {
  const BFloat16 *keys[kChunkPages], *values[kChunkPages];
  int64_t size, count;

  ChunkPages(const Attention<BFloat16>& a, const TileWorkspace& w, const Chunk& chunk)
      : size(chunk.size()),
        count(chunk.num_pages()),
        a_(a),
        widened_(w.widened),
        head_(chunk.tile.head),
        table_(chunk.blocks(a)) {}

  void read_keys() {
    for (int64_t page = 0; page < count; page++) keys[page] = widened_.key_page(a_.pages, page, table_[page], head_);
  }
  void read_values() {
    for (int64_t page = 0; page < count; page++) values[page] = widened_.value_page(a_.pages, page, table_[page], head_);
  }

 private:
  const Attention<BFloat16>& a_;
  const WidenedPages<BFloat16>& widened_;
  const int64_t head_;
  const int32_t* const table_;
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
  for (int64_t column = 0; column < w.value_dim; column += width * tiles::kColumns) {
    if (column + width * tiles::kColumns > w.value_dim) width = 2;
    const BFloat16* runs[kChunkPages];
    for (int64_t page = 0; page < pages.count; page++) runs[page] = pages.values[page] + column * 2;
    const tiles::Right right{runs, pages.size / tiles::kDepth, kPageTiles, tiles::kRows * w.value_dim * 2,
                             tiles::kColumns * 2, w.value_dim * 2 * static_cast<int64_t>(sizeof(BFloat16))};
    const tiles::Sums to{w.sum(row, column), tiles::kSums, tiles::kColumns * sizeof(float)};
    multiply_rows(w.weights, row, rows, width, right, to, w.value_dim / tiles::kColumns * tiles::kSums, true, ahead);
  }
}

inline void attend_chunk(const Attention<BFloat16>& a, const TileWorkspace& w, const Chunk& chunk, Ahead& ahead) {
  const Tile& tile = chunk.tile;
  const int64_t rows = (tile.last - tile.first) * a.group(), n = chunk.size();
  w.scales.load(a.pages, chunk.blocks(a), chunk.num_pages(), tile.head);
  ChunkPages pages(a, w, chunk);
  pages.read_keys();
  for (int64_t first = 0; first < rows; first += kRowsTogether) {
    const int64_t last = std::min(rows, first + kRowsTogether);
    for (int64_t row = first; row < last; row += 2 * tiles::kRows)
      score_rows(w, pages, row, std::min(2 * tiles::kRows, last - row), ahead);
    for (int64_t row = first; row < last; row++) softmax_chunk(a, w, row, chunk.seen(a, row), n);
    if (first == 0) pages.read_values();
    for (int64_t row = first; row < last; row += 2 * tiles::kRows)
      sum_values(w, pages, row, std::min(2 * tiles::kRows, last - row), ahead);
  }
}

}  // namespace millrace
