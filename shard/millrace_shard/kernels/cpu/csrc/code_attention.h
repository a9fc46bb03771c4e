// The attention of attention.h over codes, in float32 by vectors, for head dims that are multiples of 32.
//
// Codes are widened in registers and multiplied with float32 queries and weights: without a tile unit this is faster
// than products of bfloat16. A vector holds pairs of channels, or of positions for values, as the pages do, and the two
// sums of a pair are added at the end. A row's sums have one order, whatever other rows are present.
#pragma once

#include "chunks.h"

namespace millrace {

// Working memory of one tile of queries. A row is a pair of a token and a query head of the group.
struct CodeWorkspace {
  int64_t rows, dim;
  float *scores, *sums, *row_max, *row_sum, *queries, *weights;
  ChunkScales scales;

  CodeWorkspace(Scratch& scratch, const Attention<BFloat16>& a)
      : rows(round_up(a.tile_tokens() * a.group(), tiles::kRows)), dim(a.pages.dim) {
    const int64_t floats = rows * (2 * kChunk + 2 * dim + 2);
    char* data = scratch.reserve(floats * sizeof(float) + ChunkScales::bytes());
    scores = reinterpret_cast<float*>(data);
    weights = scores + rows * kChunk;
    sums = weights + rows * kChunk;
    queries = sums + rows * dim;
    row_max = queries + rows * dim;
    row_sum = row_max + rows;
    scales = ChunkScales(reinterpret_cast<char*>(row_sum + rows), a.pages);
  }

  // 32 values of a query.
  void load_query(int64_t row, int64_t column, const BFloat16* from) const {
    for (int64_t i = 0; i < tiles::kDepth; i += kLanes) save(queries + row * dim + column + i, load(from + i));
  }
  // 32 weights of a row.
  void zero_weights(int64_t row, int64_t at) const { std::fill_n(weights + row * kChunk + at, tiles::kDepth, 0.f); }
  void save_weights(int64_t row, int64_t at, const Vec& low, const Vec& high) const {
    save(weights + row * kChunk + at, low);
    save(weights + row * kChunk + at + kLanes, high);
  }

  float* sum(int64_t row, int64_t column) const { return sums + row * dim + column; }
};

#if defined(CPU_CAPABILITY_AVX512)
// The vectors of codes that are multiplied at once, and the largest number of rows whose sums all fit into registers.
constexpr int kCodeVectors = 4, kCodeRows = 6;

inline Vec repeat_pair(const float* pair) {
  double bits;
  std::memcpy(&bits, pair, sizeof bits);
  return _mm512_castpd_ps(_mm512_set1_pd(bits));
}

// The sums of the pairs of `low`, then those of `high`.
inline Vec add_pairs(const Vec& low, const Vec& high) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  return _mm512_add_ps(_mm512_permutex2var_ps(low, even, high), _mm512_permutex2var_ps(low, odd, high));
}
#else
constexpr int kCodeVectors = 2, kCodeRows = 4;

inline Vec repeat_pair(const float* pair) {
  return _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(pair)));
}

inline Vec add_pairs(const Vec& low, const Vec& high) {
  constexpr int kByOrder = 0b11011000;
  const __m256 sums = _mm256_hadd_ps(low, high);
  return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(sums), kByOrder));
}
#endif

// The outputs of kCodeVectors vectors of codes.
constexpr int64_t kCodeColumns = kCodeVectors * kLanes / 2;

// Rows of pairs of floats times pages of codes: `pairs` pairs in K, with distances in values.
struct CodeProduct {
  const float* left;
  const uint8_t* right;
  float* sums;
  int64_t pairs, left_stride, right_stride, sum_stride;
};

// sums (+)= left [kCount, 2 pairs] x right [2 pairs, kCodeColumns]. `fetch()` is called for every 512 bytes of codes.
template <Stored kStored, int kCount, bool kAdd, typename Fetch>
void multiply_codes(const CodeProduct& p, const Fetch& fetch) {
  constexpr int64_t kPairsPerFetch = 512 / (kCodeVectors * kLanes);
  Vec totals[kCodeVectors][kCount];
#pragma GCC unroll 4
  for (int i = 0; i < kCodeVectors; i++)
#pragma GCC unroll 6
    for (int row = 0; row < kCount; row++) totals[i][row] = Vec(0.f);
  for (int64_t pair = 0; pair < p.pairs; pair++) {
    if (pair % kPairsPerFetch == 0) fetch();
    Vec codes[kCodeVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kCodeVectors; i++) codes[i] = decode<kStored>(p.right + pair * p.right_stride + i * kLanes);
#pragma GCC unroll 6
    for (int row = 0; row < kCount; row++) {
      const Vec left = repeat_pair(p.left + row * p.left_stride + 2 * pair);
#pragma GCC unroll 4
      for (int i = 0; i < kCodeVectors; i++) totals[i][row] = at::vec::fmadd(left, codes[i], totals[i][row]);
    }
  }
#pragma GCC unroll 6
  for (int row = 0; row < kCount; row++)
#pragma GCC unroll 2
    for (int i = 0; i < kCodeVectors; i += 2) {
      float* const to = p.sums + row * p.sum_stride + i * kLanes / 2;
      const Vec sums = add_pairs(totals[i][row], totals[i + 1][row]);
      save(to, kAdd ? load(to) + sums : sums);
    }
}

// `multiply_codes` for any number of rows.
template <Stored kStored, bool kAdd, typename Fetch>
void multiply_code_rows(CodeProduct p, int64_t rows, const Fetch& fetch) {
  const int64_t passes = (rows + kCodeRows - 1) / kCodeRows;
  const CodeProduct whole = p;
  for (int64_t pass = 0; pass < passes; pass++) {
    const int64_t first = rows * pass / passes, last = rows * (pass + 1) / passes;
    p.left = whole.left + first * p.left_stride;
    p.sums = whole.sums + first * p.sum_stride;
    switch (last - first) {
      case 1: multiply_codes<kStored, 1, kAdd>(p, fetch); break;
      case 2: multiply_codes<kStored, 2, kAdd>(p, fetch); break;
      case 3: multiply_codes<kStored, 3, kAdd>(p, fetch); break;
      case 4: multiply_codes<kStored, 4, kAdd>(p, fetch); break;
#if defined(CPU_CAPABILITY_AVX512)
      case 5: multiply_codes<kStored, 5, kAdd>(p, fetch); break;
#endif
      default: multiply_codes<kStored, kCodeRows, kAdd>(p, fetch);
    }
  }
}

template <Stored kStored>
void attend_codes(const Attention<BFloat16>& a, const CodeWorkspace& w, const Chunk& chunk, Ahead& ahead) {
  const int64_t rows = (chunk.tile.last - chunk.tile.first) * a.group(), dim = w.dim, n = chunk.size();
  const int32_t* const blocks = chunk.blocks(a);
  const auto fetch = [&] { ahead.fetch(); };
  w.scales.load(a.pages, blocks, chunk.num_pages(), chunk.tile.head);
  for (int64_t begin = 0; begin < n; begin += kPage) {
    const uint8_t* const page = a.pages.page<uint8_t>(a.pages.keys, blocks[begin / kPage], chunk.tile.head);
    for (int64_t key = 0; key < std::min(kPage, n - begin); key += kCodeColumns)
      multiply_code_rows<kStored, false>(
          {w.queries, page + 2 * key, w.scores + begin + key, dim / 2, dim, 2 * kPage, kChunk}, rows, fetch);
  }
  for (int64_t row = 0; row < rows; row++) softmax_chunk(a, w, row, chunk.seen(a, row), n);
  for (int64_t begin = 0; begin < n; begin += kPage) {
    const uint8_t* const page = a.pages.page<uint8_t>(a.pages.values, blocks[begin / kPage], chunk.tile.head);
    for (int64_t column = 0; column < dim; column += kCodeColumns)
      multiply_code_rows<kStored, true>({w.weights + begin, page + 2 * column, w.sums + column,
                                         std::min(kPage, n - begin) / 2, kChunk, 2 * dim, dim},
                                        rows, fetch);
  }
}

inline void attend_chunk(const Attention<BFloat16>& a, const CodeWorkspace& w, const Chunk& chunk, Ahead& ahead) {
  switch (a.pages.stored) {
    case Stored::kInt8: return attend_codes<Stored::kInt8>(a, w, chunk, ahead);
    case Stored::kE4m3: return attend_codes<Stored::kE4m3>(a, w, chunk, ahead);
    case Stored::kE5m2: return attend_codes<Stored::kE5m2>(a, w, chunk, ahead);
    case Stored::kPlain: return;
  }
}

}  // namespace millrace
