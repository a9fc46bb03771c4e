// The two halves of a decoder layer, each in one parallel region: with an operator per operation, most of the time of a
// step of few tokens would pass between operators.
#pragma once

#include "half_input.h"
#include "lora_panels.h"
#include "team_attention.h"

namespace millrace {

// The modules of each half that adapters may target: q, k, v and o; gate, up and down.
constexpr int64_t kAttentionModules = 4, kMlpModules = 3;

// y = down(silu(gate(h)) * up(h)) with h = norm(residual += x). x may be empty, or y. All are [rows, hidden] bfloat16.
//
// The instances of a thread share one working memory, so instances that live at the same time must have equal sizes.
class MlpHalf {
 public:
  MlpHalf(const at::Tensor& y, const at::Tensor& x, const at::Tensor& residual, const at::Tensor& norm, double eps,
          const at::Tensor& gate_up, const at::Tensor& gate_up_bias, const at::Tensor& down,
          const at::Tensor& down_bias, Adapters& adapters, int64_t lora_first)
      : input_(x, residual, norm, eps),
        out_(y),
        inner_(PackedWeight::count_of(gate_up) * tiles::kColumns),
        first_(gate_up, gate_up_bias, input_.residual.width, 2 * inner_, rows_at_once(out_)),
        second_(down, down_bias, inner_, out_.width, rows_at_once(out_)),
        normed_(nullptr, input_.residual.width),
        gated_(nullptr, inner_) {
    TORCH_CHECK(out_.count == input_.residual.count);
    static thread_local Scratch normed_scratch, gated_scratch;
    const int64_t at_once = rows_at_once(out_), bytes = tiles::Tiled::bytes(at_once, inner_);
    normed_ = {normed_scratch.reserve(tiles::Tiled::bytes(at_once, input_.residual.width)), input_.residual.width};
    gated_ = {gated_scratch.reserve(bytes), inner_};
    if (inner_ % tiles::kDepth != 0) std::memset(gated_.data, 0, bytes);
    if (!adapters.any()) return;
    gates_ups_ = LoraSite(adapters, lora_first, {0, inner_}, first_, 2 * inner_, true);
    downs_ = LoraSite(adapters, lora_first + 2, {0}, second_, out_.width);
  }

  // On every thread of a team.
  void operator()(Team& team) const {
    const int64_t rows = out_.count, width = input_.residual.width;
    tiles::configure(std::min(rows, tiles::kRows));
    for (int64_t begin = 0; begin < rows; begin += kRowsAtOnce) {
      const int64_t count = std::min(kRowsAtOnce, rows - begin);
      team.share(count, shared_grain(team, count, width),
                 [&](int64_t from, int64_t to) { input_(normed_, begin, begin + from, begin + to); });
      multiply_panels(team, first_, normed_, count, gates_ups_, begin,
                      [&](int64_t panel, int64_t row, const float* gates, const float* ups) {
                        const int64_t first = panel * tiles::kColumns;
                        for (int64_t i = 0; i < tiles::kColumns; i += kLanes) {
                          Vec gate = load(gates + i), up = load(ups + i);
                          if (first_.bias != nullptr) {
                            gate = gate + load(first_.bias + first + i);
                            up = up + load(first_.bias + inner_ + first + i);
                          }
                          save(gated_.at(row, first + i), silu<BFloat16>(gate) * up);
                        }
                      });
      multiply_panels(team, second_, gated_, count, downs_, begin,
                      SaveSums<BFloat16>{out_.data + begin * out_.width, out_.width, second_.bias});
    }
    tiles::release();
  }

 private:
  static int64_t rows_at_once(const Rows& rows) { return std::min(rows.count, kRowsAtOnce); }

  NormInput input_;
  Rows out_;
  int64_t inner_;
  PackedWeight first_, second_;
  tiles::Tiled normed_, gated_;
  LoraSite gates_ups_, downs_;
};

// Rows have adapters as in Adapters, whose modules from `lora_first` on are gate, up and down.
void mlp_block(at::Tensor y, const at::Tensor& x, const at::Tensor& residual, const at::Tensor& norm, double eps,
               const at::Tensor& gate_up, const at::Tensor& gate_up_bias, const at::Tensor& down,
               const at::Tensor& down_bias, const std::optional<at::Tensor>& lora_rows,
               const std::optional<at::Tensor>& lora_table, int64_t lora_first) {
  Adapters adapters(lora_rows, lora_table, lora_first, kMlpModules, y.size(0));
  const MlpHalf half(y, x, residual, norm, eps, gate_up, gate_up_bias, down, down_bias, adapters, lora_first);
  if (y.size(0) != 0) run_team(half);
}

// The parameters of a layer's heads: their counts, norms and rotation.
struct Heads {
  int64_t queries, keys, dim;
  NormWeights<BFloat16> query_norm, key_norm;
  float eps;
  const float* rope;
  int64_t rotary, positions;

  int64_t width() const { return (queries + 2 * keys) * dim; }

  // Normalises and rotates `heads` of one row of qkv in place. Query heads are numbered before key heads.
  void prepare(BFloat16* row, int64_t position, Range heads) const {
    for (int64_t head = heads.low; head < heads.high; head++) {
      BFloat16* x = row + head * dim;
      const NormWeights<BFloat16>& norm = head < queries ? query_norm : key_norm;
      if (norm.any()) norm_row(x, x, norm, sum_of_squares(x, dim), eps, dim);
      rotate(x, rope + position * rotary, rotary / 2);
    }
  }
};

// The inputs that all layers of a step share: positions, block tables and cache rows.
struct Places {
  const at::Tensor &rope, &positions, &cache_rows, &tables, &starts, &contexts;
};

// y = out(attention(h)) with h = norm(residual += x). x may be empty, or y. Keys and values are stored in their pages.
//
// The instances of a thread share one working memory, as those of MlpHalf do.
class AttentionHalf {
 public:
  AttentionHalf(const at::Tensor& y, const at::Tensor& x, const at::Tensor& residual, const at::Tensor& norm,
                double eps, const at::Tensor& qkv, const at::Tensor& qkv_bias, const at::Tensor& query_norm,
                const at::Tensor& key_norm, const at::Tensor& out, const at::Tensor& out_bias, const Places& places,
                at::TensorList cache, int64_t num_heads, double scale, int64_t window, Adapters& adapters,
                int64_t lora_first)
      : input_(x, residual, norm, eps),
        result_(y),
        pages_(cache, at::kBFloat16),
        heads_{num_heads,
               pages_.heads,
               pages_.dim,
               NormWeights<BFloat16>(query_norm),
               NormWeights<BFloat16>(key_norm),
               static_cast<float>(eps),
               places.rope.const_data_ptr<float>(),
               places.rope.size(1),
               places.rope.size(0)},
        first_(qkv, qkv_bias, input_.residual.width, heads_.width(), result_.count),
        second_(out, out_bias, num_heads * pages_.dim, result_.width, result_.count),
        position_(places.positions.const_data_ptr<int64_t>()),
        cache_row_(places.cache_rows.const_data_ptr<int64_t>()),
        normed_(nullptr, input_.residual.width),
        attended_(nullptr, num_heads * pages_.dim) {
    check(places, query_norm, key_norm);
    const int64_t rows = result_.count, width = heads_.width(), attended_width = num_heads * pages_.dim;
    static thread_local Scratch normed_scratch, qkv_scratch, attended_scratch;
    normed_ = {normed_scratch.reserve(tiles::Tiled::bytes(rows, input_.residual.width)), input_.residual.width};
    attended_ = {attended_scratch.reserve(tiles::Tiled::bytes(rows, attended_width)), attended_width};
    projected_ = reinterpret_cast<BFloat16*>(qkv_scratch.reserve(rows * width * sizeof(BFloat16)));
    attention_ = {nullptr, projected_, places.tables.const_data_ptr<int32_t>(),
                  places.starts.const_data_ptr<int32_t>(), places.contexts.const_data_ptr<int32_t>(), pages_,
                  places.contexts.numel(), num_heads, width, places.tables.stride(0), window,
                  pages_.key_scale() * static_cast<float>(scale), 0.f};
    if (!adapters.any()) return;
    const int64_t key_start = attended_width, value_start = key_start + pages_.heads * pages_.dim;
    qkvs_ = LoraSite(adapters, lora_first, {0, key_start, value_start}, first_, width);
    outs_ = LoraSite(adapters, lora_first + 3, {0}, second_, result_.width);
  }

  // Sinks [heads] float32 of the queries, and the ends of the keys that each query sees, [rows] int32, if any.
  void set_options(const std::optional<at::Tensor>& sinks, const std::optional<at::Tensor>& key_ends) {
    attention_.key_ends = ends_of(key_ends, result_.count);
    if (!sinks) return;
    TORCH_CHECK(sinks->is_contiguous() && sinks->numel() == heads_.queries);
    attention_.sinks = sinks->const_data_ptr<float>();
  }

  // Plans the tiles of queries, which are the same for every layer whose cache has the same size.
  void plan(std::vector<Tile>& tiles) const { plan_tiles(attention_, tiles); }

  // On every thread of a team.
  void operator()(Team& team, const std::vector<Tile>& tiles) const {
    const int64_t rows = result_.count, width = input_.residual.width;
    const bool alone = are_alone(tiles);
    team.share(rows, shared_grain(team, rows, width),
               [&](int64_t begin, int64_t end) { input_(normed_, 0, begin, end); });
    tiles::configure(std::min(rows, tiles::kRows));
    multiply_panels(team, first_, normed_, rows, qkvs_, 0,
                    SaveSums<BFloat16>{projected_, heads_.width(), first_.bias});
    if (!alone)
      team.share(rows, shared_grain(team, rows, heads_.width()),
                 [&](int64_t begin, int64_t end) { prepare(begin, end, {0, pages_.heads}); });
    attend_tiles(
        team, attention_, tiles, [&](int64_t token, int64_t column) { return attended_.at(token, column); },
        [&](const Tile& tile) {
          const int64_t start = attention_.starts[tile.sequence];
          if (alone) prepare(start + tile.first, start + tile.last, {tile.head, tile.head + 1});
        });
    tiles::configure(std::min(rows, tiles::kRows));
    multiply_panels(team, second_, attended_, rows, outs_, 0,
                    SaveSums<BFloat16>{result_.data, result_.width, second_.bias});
    tiles::release();
  }

 private:
  // Whether no tile reads keys that another tile stores in this step. Then the thread that attends a tile stores its
  // keys just before, while their lines are in its caches. A sequence reads only full blocks of other sequences.
  bool are_alone(const std::vector<Tile>& tiles) const {
    return std::all_of(tiles.begin(), tiles.end(), [&](const Tile& tile) {
      return tile.last - tile.first == attention_.starts[tile.sequence + 1] - attention_.starts[tile.sequence];
    });
  }

  // Normalises and rotates key heads `keys` and their query heads in rows [begin, end), and stores keys and values.
  void prepare(int64_t begin, int64_t end, Range keys) const {
    const int64_t group = attention_.group(), width = heads_.width();
    for (int64_t row = begin; row < end; row++) {
      BFloat16* const x = projected_ + row * width;
      heads_.prepare(x, position_[row], {keys.low * group, keys.high * group});
      heads_.prepare(x, position_[row], {heads_.queries + keys.low, heads_.queries + keys.high});
    }
    const BFloat16* key = projected_ + heads_.queries * pages_.dim;
    const Source<BFloat16> from{key, key + pages_.heads * pages_.dim, width, width, pages_.dim, pages_.dim};
    store_tokens(pages_, cache_row_, from, begin, end, keys);
  }

  // All checks come first: code inside the parallel region must not throw.
  void check(const Places& places, const at::Tensor& query_norm, const at::Tensor& key_norm) const {
    const int64_t rows = result_.count;
    TORCH_CHECK(places.rope.is_contiguous() && heads_.rotary % 2 == 0 && heads_.rotary <= pages_.dim);
    for (const at::Tensor& each : {query_norm, key_norm})
      TORCH_CHECK(each.numel() == 0 || each.numel() == pages_.dim);
    TORCH_CHECK(rows == input_.residual.count);
    TORCH_CHECK(places.positions.numel() == rows && places.positions.is_contiguous());
    TORCH_CHECK(places.cache_rows.numel() == rows && places.cache_rows.is_contiguous());
    TORCH_CHECK(heads_.queries % pages_.heads == 0 && pages_.dim % tiles::kDepth == 0);
    check_sequences(places.tables, places.starts, places.contexts, rows);
    for (int64_t row = 0; row < rows; row++) {
      TORCH_CHECK(position_[row] >= 0 && position_[row] < heads_.positions, "millrace: position out of range");
      TORCH_CHECK(cache_row_[row] >= 0 && cache_row_[row] < pages_.blocks * kPage, "millrace: cache row out of range");
    }
  }

  NormInput input_;
  Rows result_;
  Pages pages_;
  Heads heads_;
  PackedWeight first_, second_;
  const int64_t *position_, *cache_row_;
  BFloat16* projected_ = nullptr;
  tiles::Tiled normed_, attended_;
  LoraSite qkvs_, outs_;
  Attention<BFloat16> attention_{nullptr, nullptr, nullptr, nullptr, nullptr, pages_};
};

// Rows have adapters as in Adapters, whose modules from `lora_first` on are q, k, v and o.
void attention_block(at::Tensor y, const at::Tensor& x, const at::Tensor& residual, const at::Tensor& norm, double eps,
                     const at::Tensor& qkv, const at::Tensor& qkv_bias, const at::Tensor& query_norm,
                     const at::Tensor& key_norm, const at::Tensor& out, const at::Tensor& out_bias,
                     const at::Tensor& rope, const at::Tensor& positions, const at::Tensor& cache_rows,
                     at::TensorList cache, const at::Tensor& tables, const at::Tensor& starts,
                     const at::Tensor& contexts, int64_t num_heads, double scale, int64_t window,
                     const std::optional<at::Tensor>& lora_rows, const std::optional<at::Tensor>& lora_table,
                     int64_t lora_first, const std::optional<at::Tensor>& sinks,
                     const std::optional<at::Tensor>& key_ends) {
  Adapters adapters(lora_rows, lora_table, lora_first, kAttentionModules, y.size(0));
  const Places places{rope, positions, cache_rows, tables, starts, contexts};
  AttentionHalf half(y, x, residual, norm, eps, qkv, qkv_bias, query_norm, key_norm, out, out_bias, places, cache,
                     num_heads, scale, window, adapters, lora_first);
  static thread_local std::vector<Tile> planned;
  half.set_options(sinks, key_ends);
  half.plan(planned);
  const std::vector<Tile>& tiles = planned;
  if (y.size(0) != 0) run_team([&](Team& team) { half(team, tiles); });
}

}  // namespace millrace
