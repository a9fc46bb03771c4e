// The attention of a team of threads over tiles of queries, for head dims that are multiples of 32.
#pragma once

#include "code_attention.h"
#include "team.h"
#include "tile_attention.h"

namespace millrace {

// Attends the tile of queries that starts with `chunk`; `next` is the tile after it. place(token, column) is the
// address of an output.
template <typename Workspace, typename Place>
void attend_tile(const Attention<BFloat16>& a, const Workspace& w, Chunk chunk, const Chunk* next, Ahead& ahead,
                 int64_t& configured, const Place& place) {
  const Tile& tile = chunk.tile;
  const int64_t dim = w.dim, width = a.pages.value_dim, group = a.group(), start = a.starts[tile.sequence];
  const int64_t rows = (tile.last - tile.first) * group;
  const auto out = [&](int64_t row, int64_t column) {
    return place(start + tile.first + row / group, (tile.head * group + row % group) * width + column);
  };
  for (int64_t row = 0; row < rows; row++)
    for (int64_t column = 0; column < dim; column += tiles::kDepth) {
      w.load_query(row, column,
                   a.queries + (start + tile.first + row / group) * a.query_stride +
                       (tile.head * group + row % group) * dim + column);
      // Other cores read the last layer's outputs there. A store that waits for them delays later stores and tile
      // loads.
      if (column < width) __builtin_prefetch(out(row, column), 1);
    }
  start_rows(a, tile, rows, kLog2E, w.row_max, w.row_sum);
  std::fill_n(w.sums, round_up(rows, tiles::kRows) * width, 0.f);

  if (const int64_t tile_rows = std::min(rows, tiles::kRows); tile_rows != configured) {
    tiles::configure(tile_rows);
    configured = tile_rows;
  }
  for (bool is_last = false; !is_last; chunk.begin += kChunk) {
    is_last = chunk.is_last();
    // Where computation dominates, prefetching costs more than it saves.
    if (rows <= tiles::kRows && (!is_last || next != nullptr))
      ahead.expect(is_last ? *next : Chunk{tile, chunk.begin + kChunk, chunk.end, chunk.first});
    attend_chunk(a, w, chunk, ahead);
  }

  for (int64_t row = 0; row < rows; row++) {
    const Vec inverse(a.pages.value_scale() / w.row_sum[row]);
    for (int64_t column = 0; column < width; column += kLanes)
      save(out(row, column), load(w.sum(row, column)) * inverse);
  }
}

// Attends all tiles, in one kind of working memory. prepare(tile) is called before the tile is read.
template <typename Workspace, typename Place, typename Prepare>
void attend_tiles_in(Team& team, const Attention<BFloat16>& a, const std::vector<Tile>& tiles, const Place& place,
                     const Prepare& prepare) {
  static thread_local Scratch scratch;
  const Workspace workspace(scratch, a);
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

// The same in the working memory for this cache and unit.
template <typename Place, typename Prepare>
void attend_tiles(Team& team, const Attention<BFloat16>& a, const std::vector<Tile>& tiles, const Place& place,
                  const Prepare& prepare) {
  if (a.pages.has_codes() && !tiles::on_amx()) {
    attend_tiles_in<CodeWorkspace>(team, a, tiles, place, prepare);
  } else {
    attend_tiles_in<TileWorkspace>(team, a, tiles, place, prepare);
  }
}

inline void attend_by_tiles(const Attention<BFloat16>& a) {
  static thread_local std::vector<Tile> planned;
  plan_tiles(a, planned);
  const std::vector<Tile>& tiles = planned;
  const int64_t width = a.heads * a.pages.value_dim;
  run_team([&](Team& team) {
    attend_tiles(
        team, a, tiles, [&](int64_t token, int64_t column) { return a.out + token * width + column; },
        [](const Tile&) {});
  });
}

}  // namespace millrace
