// One thread's loop over panels of codes, with exact products.
//
// A row's sums run over the inputs of a group in one order, in float32, and are then added to the row's result, scaled,
// group by group. So a row's bits depend on the row alone.
#pragma once

#include "amx_codes.h"
#include "many_rows.h"

namespace millrace {

// Calls emit as PanelLoop does.
template <typename Emit>
class CodeLoop {
 public:
  CodeLoop(const CodePanels& panels, const CodedRows& rows, const tiles::Tiled& x, const Emit& emit)
      : w_(panels),
        rows_(rows),
        x_(x),
        emit_(emit),
        many_(panels, rows, x)
#ifdef MILLRACE_AMX
        ,
        amx_(panels, rows, x, emit)
#endif
  {
  }

  // Multiplies panels [begin, end) with at most kRowsAtOnce rows from `first` on.
  void multiply(int64_t begin, int64_t end, int64_t first, int64_t rows) {
#ifdef MILLRACE_AMX
    if (tiles::on_amx()) return amx_.multiply(begin, end, first, rows);
#endif
    if (rows <= most_in_registers(w_)) return multiply_few_rows(begin, end, first, rows);
    for (int64_t panel = begin; panel < end; panel += kPanelsAtOnce)
      many_.multiply(panel, std::min(end, panel + kPanelsAtOnce), first, rows, emit_);
  }

  // Adds and emits the remaining sums.
  void finish() {
#ifdef MILLRACE_AMX
    amx_.finish();
#endif
  }

 private:
  void multiply_few_rows(int64_t begin, int64_t end, int64_t first, int64_t rows) const {
    const FewLeft left = few_rows_of(x_, first, rows, w_.steps);
    for (int64_t panel = begin; panel < end; panel++)
      for (int64_t tile = 0; tile < rows; tile += FewLeft::kTogether) {
        const int64_t count = std::min(FewLeft::kTogether, rows - tile);
        const int64_t passes = (count + kMostFewRows - 1) / kMostFewRows;
        for (int64_t pass = 0; pass < passes; pass++)
          multiply_pass(panel, left, first, {tile + count * pass / passes, tile + count * (pass + 1) / passes});
      }
  }

  // Multiplies `rows` of those from `first` on.
  void multiply_pass(int64_t panel, const FewLeft& left, int64_t first, Range rows) const {
    alignas(64) float sums[kMostFewRows * kPanelColumns];
    multiply_few(w_, rows_, panel, left.from(rows.low), first + rows.low, rows.high - rows.low, sums);
    for (int64_t row = rows.low; row < rows.high; row++) {
      const float* of_row = sums + (row - rows.low) * kPanelColumns;
      emit_(panel, first + row, of_row, of_row + tiles::kColumns);
    }
  }

  const CodePanels& w_;
  const CodedRows& rows_;
  const tiles::Tiled& x_;
  const Emit& emit_;
  ManyRows many_;
#ifdef MILLRACE_AMX
  AmxCodeLoop<Emit> amx_;
#endif
};

}  // namespace millrace
