// A weight in one of its packed forms, and its products on a team.
#pragma once

#include "code_loop.h"
#include "integer_loop.h"

namespace millrace {

// The weight of a linear in bfloat16 panels or in panels of codes. It makes room for products of up to `rows` rows.
struct PackedWeight {
  std::optional<Panels> plain;
  CodePanels coded;
  std::optional<CodedRows> coded_rows;
  const BFloat16* bias;  // of all outputs in order, or null

  PackedWeight(const at::Tensor& packed, const at::Tensor& given, int64_t in, int64_t out, int64_t rows)
      : bias(given.numel() == 0 ? nullptr : given.const_data_ptr<BFloat16>()) {
    if (packed.scalar_type() == at::kBFloat16) {
      plain.emplace(packed, given, in, out);
      return;
    }
    TORCH_CHECK(given.is_contiguous() && (given.numel() == 0 || given.numel() == out));
    coded = CodePanels(packed, in, out);
    RowSizes sizes;
    sizes.add(coded);
    coded_rows.emplace(coded, RowMemory(sizes, rows));
  }

  // The steps of 32 inputs.
  int64_t steps() const { return plain ? plain->steps : (coded.header->in + tiles::kDepth - 1) / tiles::kDepth; }

  // The number of panels of a packed weight.
  static int64_t count_of(const at::Tensor& packed) {
    return packed.scalar_type() == at::kBFloat16 ? packed.size(0) : CodePanels::header_of(packed).panels;
  }
};

// Multiplies all panels with `rows` rows of `x` on the team; calls emit(panel, row, left sums, right sums).
template <typename Emit>
void multiply_panels(Team& team, const PackedWeight& w, const tiles::Tiled& x, int64_t rows, const Emit& emit) {
  if (w.plain) return multiply_panels(team, *w.plain, x, rows, emit);
  const CodedRows& prepared = *w.coded_rows;
  if (prepared.needs_work()) {
    const int64_t grain = std::max<int64_t>(1, std::min<int64_t>(16, (rows + team.size() - 1) / team.size()));
    team.share(rows, grain, [&](int64_t begin, int64_t end) { prepared.prepare(x, begin, end); });
  }
  const tiles::Tiled operand = prepared.operand(x);
  const int64_t grain = rows > 2 * tiles::kRows ? kPanelsAtOnce : w.coded.grain();
  if (w.coded.is_integer()) {
    IntegerLoop<Emit> loop(w.coded, prepared, operand, emit);
    share_panels(team, loop, w.coded.count, grain, rows);
  } else {
    CodeLoop<Emit> loop(w.coded, prepared, operand, emit);
    share_panels(team, loop, w.coded.count, grain, rows);
  }
}

}  // namespace millrace
