// Linears whose rows have adapters.
#pragma once

#include "lora.h"

namespace millrace {

// A linear that adapters may target: its modules in the order of their outputs. In a gated linear, the left tile of a
// panel belongs to the first module, and the right tile to the second.
class LoraSite {
 public:
  LoraSite() = default;
  // `starts` are the first outputs of the modules, multiples of 16; the linear has weights `w` and `out` outputs.
  LoraSite(Adapters& adapters, int64_t first_module, at::IntArrayRef starts, const PackedWeight& w, int64_t out,
           bool gated = false)
      : adapters_(&adapters),
        first_(first_module),
        parts_(static_cast<int64_t>(starts.size())),
        steps_(w.steps()),
        gated_(gated) {
    TORCH_CHECK(parts_ > 0 && parts_ <= kMostParts && starts[0] == 0, "millrace: bad parts of a linear");
    for (int64_t part = 0; part < parts_; part++) {
      const int64_t end = part + 1 < parts_ ? starts[part + 1] : round_up(out, tiles::kColumns);
      TORCH_CHECK(starts[part] % tiles::kColumns == 0 && starts[part] < end, "millrace: bad parts of a linear");
      ends_[part] = end / tiles::kColumns;
    }
    any_ = adapters.target(first_, parts_);
    if (any_) adapters.reserve_deltas(ends_[parts_ - 1] * tiles::kColumns);
  }

  // Whether any row has an adapter for one of the modules.
  bool any() const { return any_; }

  const int32_t* late_slots() const { return adapters_->late_slots(); }

  // Shrinks rows [begin, begin + rows) on the team, and expands them where deltas are kept. Row `begin`, a multiple of
  // 16, is the first of `x`.
  void shrink(Team& team, const tiles::Tiled& x, int64_t begin, int64_t rows) const {
    const Range jobs = jobs_of(begin, rows);
    team.share((jobs.high - jobs.low) * parts_, 1, [&](int64_t unit, int64_t) {
      const Adapters::Job& job = adapters_->job(jobs.low + unit / parts_);
      const int64_t first = job.tile * tiles::kRows, end = std::min(begin + rows, first + tiles::kRows);
      shrink_tile(x.rows(first - begin), {first, end}, job.slot, unit % parts_);
      if (adapters_->keeps_deltas() && !adapters_->is_early_tile(job.tile))
        expand_tile({first, end}, job.slot, unit % parts_);
    });
  }

  // The deltas of two tiles of a block of up to 32 rows, whose sums are in the tile unit. They are added where all rows
  // of a tile have the same adapter.
  void expand_block([[maybe_unused]] int64_t panel, [[maybe_unused]] int64_t row,
                    [[maybe_unused]] int64_t count) const {
#ifdef MILLRACE_AMX
    for (int64_t low = 0; low * tiles::kRows < count; low++) {
      const int64_t first = row + low * tiles::kRows;
      const int32_t slot = adapters_->common_slot(first / tiles::kRows);
      if (slot <= 0) continue;
      for (int64_t side = 0; side < 2; side++) {
        const Tile tile = tile_of(slot, panel, side);
        for (int64_t slice = 0; slice < tile.slices(); slice++)
          amx::add_ranks(2 * low + side, adapters_->states() + adapters_->place(tile.part, slice, first),
                         tile.b + slice * kExpandTile);
        prefetch(tile);
      }
    }
#endif
  }

  // Adds what the tile unit has not added of a late row's delta to `sums` of two tiles [2, 16].
  void expand(int64_t panel, int64_t row, float* sums) const {
    if (!adapters_->keeps_deltas() || adapters_->any_bias()) return expand_any(panel, row, sums);
    const int64_t left = gated_ ? panel * tiles::kColumns : panel * kPanelColumns;
    const int64_t right = left + (gated_ ? ends_[0] : 1) * tiles::kColumns;
    for (int64_t slice = 0; slice < adapters_->slices(); slice++) {
      const float* deltas = adapters_->deltas(slice, row);
      for (int64_t i = 0; i < tiles::kColumns; i += kLanes) {
        save(sums + i, load(sums + i) + load(deltas + left + i));
        save(sums + tiles::kColumns + i, load(sums + tiles::kColumns + i) + load(deltas + right + i));
      }
    }
  }

 private:
  // 16 outputs of one adapter's module.
  struct Tile {
    const LoraModule* module;  // or null, past the last output
    int64_t part, index;       // the number of the module in the linear, and of the tile in the module
    const BFloat16* b;

    int64_t slices() const { return module == nullptr ? 0 : module->slices; }
  };

  // expand() of rows of any kind.
  void expand_any(int64_t panel, int64_t row, float* sums) const {
    const int32_t slot = adapters_->slot(row);
    const bool is_added = adapters_->is_early_tile(row / tiles::kRows);
    for (int64_t side = 0; side < 2; side++, sums += tiles::kColumns) {
      const Tile tile = tile_of(slot, panel, side);
      for (int64_t slice = 0; slice < tile.slices() && !is_added; slice++)
        for (int64_t i = 0; i < tiles::kColumns; i += kLanes)
          save(sums + i, load(sums + i) + delta(tile, slice, row, i));
      if (const float* bias = tile.slices() > 0 ? tile.module->bias : nullptr; bias != nullptr)
        for (int64_t i = 0; i < tiles::kColumns; i += kLanes)
          save(sums + i, load(sums + i) + load(bias + tile.index * tiles::kColumns + i));
    }
  }

  Range jobs_of(int64_t begin, int64_t rows) const {
    return adapters_->jobs(begin / tiles::kRows, (begin + rows + tiles::kRows - 1) / tiles::kRows);
  }

  Tile tile_of(int64_t slot, int64_t panel, int64_t side) const {
    int64_t part = side, index = panel;
    if (!gated_) {
      index = 2 * panel + side;
      part = 0;
      while (part < parts_ && index >= ends_[part]) part++;
      if (part == parts_) return {nullptr, 0, 0, nullptr};
      if (part > 0) index -= ends_[part - 1];
    }
    const LoraModule& module = adapters_->module(slot, first_ + part);
    return {&module, part, index, module.b + index * module.slices * kExpandTile};
  }

  // The first tile of a module among those of the linear.
  int64_t start_of(int64_t part) const { return part == 0 ? 0 : ends_[part - 1]; }

  // The delta of kLanes outputs of a tile from the i-th on.
  Vec delta(const Tile& tile, int64_t slice, int64_t row, int64_t i) const {
    const int64_t output = (start_of(tile.part) + tile.index) * tiles::kColumns + i;
    if (adapters_->keeps_deltas()) return load(adapters_->deltas(slice, row) + output);
    const ExpandTile b(tile.b + slice * kExpandTile + 2 * i);
    return b(adapters_->wide() + adapters_->place(tile.part, slice, row));
  }

  // Keeps the deltas of all outputs of a module for the rows of one adapter.
  void expand_tile(Range rows, int32_t slot, int64_t part) const {
    const LoraModule& module = adapters_->module(slot, first_ + part);
    int64_t own[tiles::kRows], count = 0;
    for (int64_t row = rows.low; row < rows.high; row++)
      if (adapters_->slot(row) == slot) own[count++] = row;
    for (int64_t slice = 0; slice < adapters_->slices(); slice++) {
      const float* states[tiles::kRows];
      float* deltas[tiles::kRows];
      for (int64_t i = 0; i < count; i++) {
        states[i] = adapters_->wide() + adapters_->place(part, slice, own[i]);
        deltas[i] = adapters_->deltas(slice, own[i]) + start_of(part) * tiles::kColumns;
      }
      const int64_t outputs = (ends_[part] - start_of(part)) * tiles::kColumns;
      if (slice >= module.slices) {
        for (int64_t i = 0; i < count; i++) std::fill_n(deltas[i], outputs, -0.f);
        continue;
      }
      const BFloat16* b = module.b + slice * kExpandTile;
      for (int64_t output = 0; output < outputs; output += tiles::kColumns, b += module.slices * kExpandTile) {
        fetch_after(b, kExpandTile);
        for (int64_t column = 0; column < tiles::kColumns; column += kLanes) {
          const ExpandTile columns(b + 2 * column);
          for (int64_t i = 0; i < count; i++) save(deltas[i] + output + column, columns(states[i]));
        }
      }
    }
  }

  // Fetches the tile of the same side of the next panel.
  void prefetch(const Tile& tile) const {
    const int64_t size = tile.slices() * kExpandTile;
    const BFloat16* next = tile.b + (gated_ ? 1 : 2) * size;
    for (int64_t i = 0; i < size; i += 64 / sizeof(BFloat16))
      _mm_prefetch(reinterpret_cast<const char*>(next + i), _MM_HINT_T0);
  }

  void shrink_tile(const BFloat16* x, Range rows, int32_t slot, int64_t part) const {
    const LoraModule& module = adapters_->module(slot, first_ + part);
    alignas(64) float sums[tiles::kSums];
    for (int64_t slice = 0; slice < module.slices; slice++) {
      const BFloat16* a = module.a + slice * steps_ * tiles::kTile;
#ifdef MILLRACE_AMX
      const auto fetch = [](const BFloat16* tile) { fetch_after(tile, tiles::kTile); };
      if (tiles::on_amx()) amx::multiply_column(x, a, steps_, sums, fetch);
#endif
      for (int64_t row = rows.low; row < rows.high; row++) {
        if (adapters_->slot(row) != slot) continue;
        float* of_row = sums + (row - rows.low) * kRanks;
        if (!tiles::on_amx()) shrink_row(of_row, x + (row - rows.low) * tiles::kDepth, a, steps_);
        const int64_t place = adapters_->place(part, slice, row);
        for (int64_t i = 0; i < kRanks; i += kLanes) {
          const Vec value = load(of_row + i) * load(module.factors + slice * kRanks + i);
          const Vec kept = Vec::blendv(value, Vec(0.f), value.abs() < Vec(kSmallestFactor));
          save(adapters_->wide() + place + i, save(adapters_->states() + place + i, kept));
        }
      }
    }
  }

  const Adapters* adapters_ = nullptr;
  int64_t first_ = 0, parts_ = 0, steps_ = 0;
  bool gated_ = false, any_ = false;
  std::array<int64_t, kMostParts> ends_{};  // in tiles of outputs
};

}  // namespace millrace
