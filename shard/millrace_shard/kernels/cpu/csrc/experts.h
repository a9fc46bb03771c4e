// The experts of a layer in one parallel region: each computes the rows that chose it, and the results of a row are
// added in the order of its choice. A row's bits do not depend on the experts of other rows.
#pragma once

#include "expert_table.h"
#include "norms.h"
#include "router.h"

namespace millrace {

// Pairs of a row and a chosen expert that are computed at once.
constexpr int64_t kPairsAtOnce = 4096;

// The function of the gates: silu, or that of gpt-oss if `limit` is positive.
struct GateFunction {
  float alpha, limit;

  Vec operator()(const Vec& gate, const Vec& up) const {
    if (limit <= 0.f) return silu<BFloat16>(gate) * up;
    const Vec most(limit), least(-limit), one(1.f);
    const Vec g = at::vec::minimum(gate, most), u = at::vec::clamp(up, least, most);
    return (u + one) * (g / (one + (g * Vec(-alpha)).exp()));
  }
};

// Up to kRowsAtOnce pairs of one expert, at rows from `first` on of the gathered rows.
struct ExpertRows {
  int32_t expert;
  int64_t first, count;
};

class ExpertsOfRows {
 public:
  ExpertsOfRows(const at::Tensor& y, const at::Tensor& x, const Router& router, const ExpertTable& gate_up,
                const ExpertTable& down, int64_t inner, const GateFunction& activate)
      : y_(y.mutable_data_ptr<BFloat16>()),
        x_(x.const_data_ptr<BFloat16>()),
        rows_(x.size(0)),
        width_(router.width),
        inner_(inner),
        router_(router),
        first_(gate_up),
        second_(down),
        activate_(activate),
        gathered_(nullptr, width_),
        gated_(nullptr, inner_) {
    static thread_local Scratch scratch, tiled, floats;
    static thread_local std::vector<ExpertRows> parts;
    static thread_local std::vector<int64_t> counts;
    const int64_t k = router_.top_k;
    at_once_ = std::max<int64_t>(1, std::min(rows_, kPairsAtOnce / k));
    const int64_t pairs = at_once_ * k, hit = std::min(pairs, router_.experts);
    const int64_t most = pairs + hit * (tiles::kRows - 1) + tiles::kRows;
    char* memory = scratch.reserve(pairs * (2 * sizeof(int32_t) + sizeof(float)));
    chosen_ = reinterpret_cast<int32_t*>(memory);
    places_ = chosen_ + pairs;
    shares_ = reinterpret_cast<float*>(places_ + pairs);
    const int64_t gathered = tiles::Tiled::bytes(most, width_), gated = tiles::Tiled::bytes(most, inner_);
    gathered_ = {tiled.reserve(gathered + gated), width_};
    gated_ = {reinterpret_cast<char*>(gathered_.data) + gathered, inner_};
    if (inner_ % tiles::kDepth != 0) std::memset(gated_.data, 0, gated);
    RowSizes sizes = first_.sizes();
    sizes.add(second_.sizes());
    memory_.emplace(sizes, most);
    results_ = reinterpret_cast<float*>(floats.reserve(most * width_ * sizeof(float)));
    // Nothing may be allocated in the parallel region.
    parts.reserve(hit + pairs / kRowsAtOnce);
    counts.resize(router_.experts);
    parts_ = &parts;
    counts_ = counts.data();
  }

  // On every thread of a team.
  void operator()(Team& team) const {
    for (int64_t begin = 0; begin < rows_; begin += at_once_) {
      const int64_t count = std::min(at_once_, rows_ - begin);
      const BFloat16* x = x_ + begin * width_;
      team.share(count, 1, [&](int64_t from, int64_t to) { choose(x, from, to); });
      team.share(1, 1, [&](int64_t, int64_t) { group(count); });
      team.share(count, 1, [&](int64_t from, int64_t to) { gather(x, from, to); });
      multiply(team, first_, gathered_, [&](int64_t expert) {
        const BFloat16* bias = first_.bias_of(expert);
        return [this, bias](int64_t panel, int64_t row, const float* gates, const float* ups) {
          const int64_t first = panel * tiles::kColumns;
          for (int64_t i = 0; i < tiles::kColumns; i += kLanes) {
            Vec gate = load(gates + i), up = load(ups + i);
            if (bias != nullptr) {
              gate = gate + load(bias + first + i);
              up = up + load(bias + inner_ + first + i);
            }
            save(gated_.at(row, first + i), activate_(gate, up));
          }
        };
      });
      prepare(team, count);
      multiply(team, second_, gated_,
               [&](int64_t expert) { return SaveSums<float>{results_, width_, second_.bias_of(expert)}; });
      team.share(count, 1, [&](int64_t from, int64_t to) { add(begin, from, to); });
    }
    tiles::release();
  }

 private:
  void choose(const BFloat16* x, int64_t from, int64_t to) const {
    static thread_local Scratch scratch;
    float* memory = reinterpret_cast<float*>(scratch.reserve(router_.floats() * sizeof(float)));
    for (int64_t row = from; row < to; row++)
      router_.choose(x + row * width_, chosen_ + row * router_.top_k, shares_ + row * router_.top_k, memory);
  }

  // Gives every pair a place among the gathered rows: those of an expert follow each other, from a new tile on.
  void group(int64_t count) const {
    const int64_t pairs = count * router_.top_k;
    std::fill_n(counts_, router_.experts, 0);
    for (int64_t pair = 0; pair < pairs; pair++) counts_[chosen_[pair]]++;
    parts_->clear();
    int64_t next = 0;
    for (int64_t expert = 0; expert < router_.experts; expert++) {
      const int64_t rows = std::exchange(counts_[expert], next);
      for (int64_t done = 0; done < rows; done += kRowsAtOnce)
        parts_->push_back({static_cast<int32_t>(expert), next + done, std::min(kRowsAtOnce, rows - done)});
      next += round_up(rows, tiles::kRows);
    }
    for (int64_t pair = 0; pair < pairs; pair++) places_[pair] = static_cast<int32_t>(counts_[chosen_[pair]]++);
  }

  void gather(const BFloat16* x, int64_t from, int64_t to) const {
    for (int64_t pair = from * router_.top_k; pair < to * router_.top_k; pair++) {
      const BFloat16* row = x + pair / router_.top_k * width_;
      for (int64_t column = 0; column < width_; column += tiles::kDepth)
        std::memcpy(gathered_.at(places_[pair], column), row + column, tiles::kDepth * sizeof(BFloat16));
      if (first_.sizes().any()) prepare(first_, gathered_, pair);
    }
  }

  // Prepares the row of a pair for codes.
  void prepare(const ExpertTable& w, const tiles::Tiled& x, int64_t pair) const {
    const ExpertWeight& weight = w.of(chosen_[pair]);
    if (!weight.is_coded()) return;
    const CodedRows rows(weight.coded, *memory_);
    if (rows.needs_work()) rows.prepare(x, places_[pair], places_[pair] + 1);
  }

  void prepare(Team& team, int64_t count) const {
    if (!second_.sizes().any()) return;
    team.share(count * router_.top_k, 1, [&](int64_t pair, int64_t) { prepare(second_, gated_, pair); });
  }

  // Multiplies the rows of each expert with its panels; emit_of(expert) takes the sums.
  template <typename EmitOf>
  void multiply(Team& team, const ExpertTable& w, const tiles::Tiled& x, const EmitOf& emit_of) const {
    const bool in_parts = std::any_of(parts_->begin(), parts_->end(), [&](const ExpertRows& part) {
      const ExpertWeight& weight = w.of(part.expert);
      return weight.is_coded() ? part.count > 2 * tiles::kRows
                               : PanelLoop<SaveSums<float>>::in_parts(weight.plain, part.count);
    });
    const ExpertWeight& some = w.of(parts_->front().expert);
    const int64_t grain = in_parts ? kPanelsAtOnce : std::min(some.grain(), kPanelsAtOnce);
    const int64_t panels = some.count(), groups = (panels + grain - 1) / grain;
    team.share(static_cast<int64_t>(parts_->size()) * groups, 1, [&](int64_t unit, int64_t) {
      const ExpertRows& part = (*parts_)[unit / groups];
      const int64_t begin = unit % groups * grain, end = std::min(panels, begin + grain);
      if (end == panels && unit / groups + 1 < static_cast<int64_t>(parts_->size()))
        prefetch(w.of((*parts_)[unit / groups + 1].expert));
      tiles::configure(std::min(part.count, tiles::kRows));
      multiply(w.of(part.expert), x, {begin, end}, part, emit_of(part.expert));
    });
  }

  template <typename Emit>
  void multiply(const ExpertWeight& w, const tiles::Tiled& x, Range panels, const ExpertRows& part,
                const Emit& emit) const {
    const auto run = [&](auto loop) {
      loop.multiply(panels.low, panels.high, part.first, part.count);
      loop.finish();
    };
    if (!w.is_coded()) return run(PanelLoop<Emit>(w.plain, x, emit));
    const CodedRows rows(w.coded, *memory_);
    const tiles::Tiled operand = rows.operand(x);
    if (w.coded.is_integer()) {
      run(IntegerLoop<Emit>(w.coded, rows, operand, emit));
    } else {
      run(CodeLoop<Emit>(w.coded, rows, operand, emit));
    }
  }

  // The first lines of an expert that is next: the hardware follows the end of the last one instead.
  static void prefetch(const ExpertWeight& weight) {
    constexpr int64_t kBytes = 4096;
    for (int64_t i = 0; i < std::min(kBytes, weight.bytes()); i += 64) _mm_prefetch(weight.data() + i, _MM_HINT_T1);
  }

  void add(int64_t begin, int64_t from, int64_t to) const {
    for (int64_t row = from; row < to; row++) {
      const int32_t* places = places_ + row * router_.top_k;
      const float* shares = shares_ + row * router_.top_k;
      for (int64_t i = 0; i < width_; i += kLanes) {
        Vec total(0.f);
        for (int64_t rank = 0; rank < router_.top_k; rank++)
          total = at::vec::fmadd(load(results_ + places[rank] * width_ + i), Vec(shares[rank]), total);
        save(y_ + (begin + row) * width_ + i, total);
      }
    }
  }

  BFloat16* y_;
  const BFloat16* x_;
  int64_t rows_, width_, inner_, at_once_ = 0;
  const Router& router_;
  const ExpertTable &first_, &second_;
  GateFunction activate_;
  std::optional<RowMemory> memory_;
  tiles::Tiled gathered_, gated_;
  int32_t *chosen_ = nullptr, *places_ = nullptr;
  float *shares_ = nullptr, *results_ = nullptr;
  std::vector<ExpertRows>* parts_ = nullptr;
  int64_t* counts_ = nullptr;
};

inline const float* floats_or_null(const at::Tensor& values, int64_t count) {
  TORCH_CHECK(values.is_contiguous() && (values.numel() == 0 || values.numel() == count));
  return values.numel() == 0 ? nullptr : values.const_data_ptr<float>();
}

// y [rows, hidden] = the sum of the chosen experts of x [rows, hidden] times their shares; both bfloat16. The router
// has a weight [experts, hidden], a bias and a correction [experts] or empty, all float32; `rule` holds top_k, scoring,
// renormalise, groups, top_groups and group_members. Experts are in an ExpertTable each for gates and ups, in gated panels, and for
// down; biases are [experts, outputs] or empty. A positive `limit` stands for the gates of gpt-oss.
void experts(at::Tensor y, const at::Tensor& x, const at::Tensor& router, const at::Tensor& router_bias,
             const at::Tensor& correction, at::IntArrayRef rule, double scale, const at::Tensor& gate_up,
             const at::Tensor& gate_up_bias, const at::Tensor& down, const at::Tensor& down_bias, double alpha,
             double limit) {
  const int64_t rows = x.size(0), width = x.size(1), count = router.size(0);
  const int64_t inner = ExpertTable::outputs_of(gate_up) / 2;
  TORCH_CHECK(x.is_contiguous() && y.is_contiguous() && x.sizes() == y.sizes() && width % tiles::kDepth == 0);
  TORCH_CHECK(x.scalar_type() == at::kBFloat16 && y.scalar_type() == at::kBFloat16);
  TORCH_CHECK(router.is_contiguous() && router.scalar_type() == at::kFloat && router.size(1) == width);
  TORCH_CHECK(rule.size() == 6 && rule[0] > 0 && rule[0] <= count && rule[1] >= 0 && rule[1] <= 2);
  TORCH_CHECK(rule[3] > 0 && count % rule[3] == 0 && rule[4] > 0 && rule[4] <= rule[3]);
  TORCH_CHECK(rule[5] == 1 || rule[5] == 2);
  TORCH_CHECK(rule[3] <= Router::kMostGroups, "millrace: too many groups of experts");
  const Router choice{router.const_data_ptr<float>(), floats_or_null(router_bias, count),
                      floats_or_null(correction, count), count, width, rule[0], static_cast<Scoring>(rule[1]),
                      rule[2] != 0, rule[3], rule[4], rule[5], static_cast<float>(scale)};
  const ExpertTable first(gate_up, gate_up_bias, count, width, 2 * inner);
  const ExpertTable second(down, down_bias, count, inner, width);
  if (rows == 0) return;
  const ExpertsOfRows run(y, x, choice, first, second, inner, {static_cast<float>(alpha), static_cast<float>(limit)});
  run_team(run);
}

}  // namespace millrace
