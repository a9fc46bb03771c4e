// A weight in one of its packed forms, and its products on a team.
#pragma once

#include "code_loop.h"
#include "integer_loop.h"

namespace millrace {

// The weight of a linear in bfloat16 panels or in panels of codes. It makes room for products of up to `rows` rows.
struct PackedWeight {
  // The outputs whose codes have one form.
  struct Form {
    CodePanels panels;
    CodedRows rows;
    int64_t first;  // panel
  };
  std::optional<Panels> plain;
  std::vector<Form> coded;
  const BFloat16* bias;  // of all outputs in order, or null

  PackedWeight(const at::Tensor& packed, const at::Tensor& given, int64_t in, int64_t out, int64_t rows)
      : bias(given.numel() == 0 ? nullptr : given.const_data_ptr<BFloat16>()) {
    if (packed.scalar_type() == at::kBFloat16) {
      plain.emplace(packed, given, in, out);
      return;
    }
    TORCH_CHECK(given.is_contiguous() && (given.numel() == 0 || given.numel() == out));
    const std::vector<CodePanels> forms = CodePanels::all_of(packed, in, out);
    RowSizes sizes;
    for (const CodePanels& form : forms) sizes.add(form);
    const RowMemory memory(sizes, rows);
    int64_t first = 0;
    for (const CodePanels& form : forms) {
      coded.push_back({form, CodedRows(form, memory), first});
      first += form.count;
    }
  }

  // The steps of 32 inputs.
  int64_t steps() const { return plain ? plain->steps : coded.front().panels.steps; }

  // The number of panels of a packed weight.
  static int64_t count_of(const at::Tensor& packed) {
    if (packed.scalar_type() == at::kBFloat16) return packed.size(0);
    const CodeHeader* header = &CodePanels::header_of(packed);
    int64_t count = header->panels;
    for (int64_t at = header->next; header->next != 0; at += header->next) {
      header = &CodePanels::header_of(packed, at);
      count += header->panels;
    }
    return count;
  }
};

// An `Emit` of products whose panels are counted from `first` on.
template <typename Emit>
struct EmitFrom {
  const Emit& emit;
  int64_t first;

  void operator()(int64_t panel, int64_t row, const float* left, const float* right) const {
    emit(first + panel, row, left, right);
  }
  void expand_block(int64_t panel, int64_t row, int64_t count) const
    requires requires(const Emit& each) { each.expand_block(panel, row, count); }
  {
    emit.expand_block(first + panel, row, count);
  }
};

// Multiplies all panels with `rows` rows of `x` on the team; calls emit(panel, row, left sums, right sums).
template <typename Emit>
void multiply_panels(Team& team, const PackedWeight& w, const tiles::Tiled& x, int64_t rows, const Emit& emit) {
  if (w.plain) return multiply_panels(team, *w.plain, x, rows, emit);
  for (const PackedWeight::Form& form : w.coded) {
    if (form.rows.needs_work()) {
      const int64_t grain = std::max<int64_t>(1, std::min<int64_t>(16, (rows + team.size() - 1) / team.size()));
      team.share(rows, grain, [&](int64_t begin, int64_t end) { form.rows.prepare(x, begin, end); });
    }
    const tiles::Tiled operand = form.rows.operand(x);
    const int64_t grain = rows > 2 * tiles::kRows ? kPanelsAtOnce : form.panels.grain();
    const EmitFrom<Emit> from{emit, form.first};
    if (form.panels.is_integer()) {
      IntegerLoop<EmitFrom<Emit>> loop(form.panels, form.rows, operand, from);
      share_panels(team, loop, form.panels.count, grain, rows);
    } else {
      CodeLoop<EmitFrom<Emit>> loop(form.panels, form.rows, operand, from);
      share_panels(team, loop, form.panels.count, grain, rows);
    }
  }
}

}  // namespace millrace
