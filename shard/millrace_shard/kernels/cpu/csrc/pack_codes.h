// Packs weights of 4 and 8 bits.
#pragma once

#include <c10/util/Half.h>

#include <cmath>

#include "codes.h"

namespace millrace {

// A matrix [out, in] of codes with scales and offsets [out, groups], stored in parts [n, in]; offsets may be missing.
class CodeRows {
 public:
  CodeRows(at::TensorList codes, at::TensorList scales, at::TensorList offsets, int64_t group) {
    TORCH_CHECK(!codes.empty() && codes.size() == scales.size());
    TORCH_CHECK(offsets.empty() || offsets.size() == codes.size());
    in = codes[0].size(1);
    groups = (in + group - 1) / group;
    for (size_t i = 0; i < codes.size(); i++) {
      TORCH_CHECK(codes[i].scalar_type() == at::kByte && codes[i].dim() == 2 && codes[i].size(1) == in);
      TORCH_CHECK(codes[i].stride(1) == 1);
      check(scales[i], codes[i].size(0));
      if (!offsets.empty()) check(offsets[i], codes[i].size(0));
      for (int64_t row = 0; row < codes[i].size(0); row++)
        rows_.push_back({codes[i].const_data_ptr<uint8_t>() + row * codes[i].stride(0),
                         scales[i].const_data_ptr<float>() + row * groups,
                         offsets.empty() ? nullptr : offsets[i].const_data_ptr<float>() + row * groups});
    }
    out = static_cast<int64_t>(rows_.size());
    scale_type = smallest_type([](const Row& row) { return row.scales; });
    offset_type = offsets.empty() ? ScaleType::kNone : smallest_type([](const Row& row) { return row.offsets; });
  }

  struct Row {
    const uint8_t* codes;
    const float *scales, *offsets;
  };

  // The row of an output; all null past the last one.
  Row row(int64_t output) const { return output < out ? rows_[output] : Row{nullptr, nullptr, nullptr}; }

  int64_t in = 0, out = 0, groups = 0;
  ScaleType scale_type, offset_type;

 private:
  void check(const at::Tensor& scales, int64_t rows) const {
    TORCH_CHECK(scales.scalar_type() == at::kFloat && scales.is_contiguous() && scales.dim() == 2);
    TORCH_CHECK(scales.size(0) == rows && scales.size(1) == groups, "millrace: not one scale per output and group");
  }

  // The smallest type that holds all numbers exactly.
  template <typename Of>
  ScaleType smallest_type(const Of& of) const {
    bool fits_bfloat16 = true, fits_half = true;
    for (const Row& row : rows_)
      for (int64_t group = 0; group < groups; group++) {
        const float value = of(row)[group];
        fits_bfloat16 = fits_bfloat16 && static_cast<float>(BFloat16(value)) == value;
        fits_half = fits_half && static_cast<float>(c10::Half(value)) == value;
      }
    return fits_bfloat16 ? ScaleType::kBFloat16 : fits_half ? ScaleType::kHalf : ScaleType::kFloat;
  }

  std::vector<Row> rows_;
};

// Packs the codes of 16 outputs and one step into a tile. A line of 64 bytes has the codes of several operand registers:
// lane e of register j has its code at bit `bits * j` of lane e of the line.
inline void pack_code_tile(uint8_t* to, const CodePanels& w, const CodeRows::Row* rows, int64_t step) {
  const int64_t depth = w.depth(), bits = w.bits(), together = depth / 16;
  const int64_t lane_bits = w.is_integer() ? 8 : 16, per_line = lane_bits / bits;
  const int64_t lines = 16 / per_line, lanes = 64 * 8 / lane_bits;
  std::memset(to, 0, 64 * lines);
  for (int64_t line = 0; line < lines; line++)
    for (int64_t lane = 0; lane < lanes; lane++) {
      const CodeRows::Row& row = rows[lane / together];
      if (row.codes == nullptr) continue;
      uint32_t packed = 0;
      for (int64_t j = 0; j < per_line; j++) {
        const int64_t input = step * depth + (line * per_line + j) * together + lane % together;
        if (input < w.header->in) packed |= static_cast<uint32_t>(row.codes[input]) << (bits * j);
      }
      std::memcpy(to + line * 64 + lane * lane_bits / 8, &packed, lane_bits / 8);
    }
}

// Stores one number of 32 outputs as `type`.
inline void pack_scale(uint8_t* to, ScaleType type, int64_t i, float value) {
  if (type == ScaleType::kFloat) {
    std::memcpy(to + 4 * i, &value, 4);
  } else {
    const uint16_t bits = type == ScaleType::kBFloat16 ? BFloat16(value).x : c10::Half(value).x;
    std::memcpy(to + 2 * i, &bits, 2);
  }
}

inline void pack_code_panel(uint8_t* base, const CodePanels& w, const CodeRows& weight, int64_t panel, bool gated) {
  CodeRows::Row rows[kPanelColumns];
  for (int64_t i = 0; i < kPanelColumns; i++) {
    const int64_t half = i / tiles::kColumns, column = i % tiles::kColumns;
    rows[i] = weight.row(gated ? half * weight.out / 2 + panel * tiles::kColumns + column : panel * kPanelColumns + i);
  }
  // `base` is the writable memory of w.data.
  const auto writable = [&](const uint8_t* at) { return base + (at - w.data); };
  for (int64_t step = 0; step < w.steps; step++)
    for (int64_t half = 0; half < 2; half++)
      pack_code_tile(writable(w.codes(panel, step)) + half * w.step_bytes / 2, w, rows + half * tiles::kColumns, step);
  const int64_t slots = w.is_half ? 2 * w.steps : w.groups;
  for (int64_t group = 0; group < slots; group++) {
    uint8_t* scales = writable(w.scales(panel, group));
    std::memset(scales, 0, w.scale_size + w.offset_size);
    if (group >= w.groups) continue;
    for (int64_t i = 0; i < kPanelColumns; i++) {
      if (rows[i].codes == nullptr) continue;
      pack_scale(scales, weight.scale_type, i, rows[i].scales[group]);
      if (rows[i].offsets != nullptr)
        pack_scale(scales + w.scale_size, weight.offset_type, i, rows[i].offsets[group]);
    }
  }
}

// Fills the tables of a header from `values` [16 or 256] float32. Integer values are codes minus a constant, or small
// integers in a table of 16.
inline void set_table(CodeHeader& header, const at::Tensor& values) {
  TORCH_CHECK(values.scalar_type() == at::kFloat && values.is_contiguous() && values.dim() == 1);
  const int64_t size = values.numel();
  TORCH_CHECK(size == 16 || size == 256, "millrace: a table of 16 or 256 values");
  const float* from = values.const_data_ptr<float>();
  header.parts = 1;
  bool is_shifted = from[0] == std::floor(from[0]) && from[0] <= 0 && from[0] >= -255;
  for (int64_t code = 0; code < 256; code++) {
    const float value = from[code % size];
    const BFloat16 high(value);
    const BFloat16 low(std::isfinite(value) ? value - static_cast<float>(high) : 0.f);
    header.table.parts[0][code] = high.x;
    header.table.parts[1][code] = low.x;
    if (static_cast<float>(low) != 0.f) header.parts = 2;
    is_shifted = is_shifted && value == static_cast<float>(code % size) + from[0];
  }
  const bool is_integer = header.is_integer != 0;
  header.codes = size == 16 ? (is_shifted && is_integer ? Codes::kInteger4 : Codes::kTable4)
                            : (is_shifted ? Codes::kInteger8 : Codes::kTable8);
  header.zero = is_shifted ? static_cast<int64_t>(-from[0]) : 0;
  if (!is_integer || is_shifted) return;
  TORCH_CHECK(header.codes == Codes::kTable4, "millrace: no integer products of these values");
  header.zero = 128;
  for (int64_t code = 0; code < 16; code++) {
    TORCH_CHECK(from[code] == std::floor(from[code]) && std::fabs(from[code]) < 128.f,
                "millrace: integer products need integer values");
    header.bytes[code] = static_cast<uint8_t>(from[code] + 128.f);
  }
}

// Packs the codes of a weight; see CodePanels. `group` is a multiple of 16 inputs, or of 32 with integer products, or
// at least all inputs. `order` int64 [in] may be empty. If `gated`, panels are laid out as by pack_panels.
inline at::Tensor pack_codes(at::TensorList codes, const at::Tensor& values, at::TensorList scales,
                             at::TensorList offsets, int64_t group, const at::Tensor& order, bool gated,
                             bool integer) {
  const CodeRows weight(codes, scales, offsets, group);
  TORCH_CHECK(!gated || weight.out % kPanelColumns == 0, "millrace: gates come in multiples of 16");
  CodeHeader header{};
  header.magic = kCodeMagic;
  header.in = weight.in;
  header.out = weight.out;
  header.panels = round_up(weight.out, kPanelColumns) / kPanelColumns;
  header.is_integer = integer ? 1 : 0;
  set_table(header, values);
  header.group = group;
  header.scales = weight.scale_type;
  header.offsets = weight.offset_type;
  header.has_order = order.numel() == 0 ? 0 : 1;
  header.data = sizeof(CodeHeader) + (header.has_order != 0 ? round_up(weight.in * 4, 64) : 0);
  const int64_t depth = integer ? 2 * tiles::kDepth : tiles::kDepth;
  TORCH_CHECK(group >= weight.in || group % depth == 0 || group == depth / 2,
              "millrace: groups of ", group, " inputs are not supported");
  std::vector<uint8_t> nothing(header.data);
  const CodePanels sizes(header, nothing.data());
  at::Tensor packed = WeightMemory::empty({header.data + sizes.count * sizes.panel_bytes}, codes[0].options());
  uint8_t* to = packed.mutable_data_ptr<uint8_t>();
  std::memset(to, 0, header.data);
  std::memcpy(to, &header, sizeof header);
  if (header.has_order != 0) {
    TORCH_CHECK(order.scalar_type() == at::kLong && order.is_contiguous() && order.numel() == weight.in);
    int32_t* inputs = reinterpret_cast<int32_t*>(to + sizeof(CodeHeader));
    for (int64_t i = 0; i < weight.in; i++) {
      const int64_t input = order.const_data_ptr<int64_t>()[i];
      TORCH_CHECK(input >= 0 && input < weight.in, "millrace: an input out of range");
      inputs[i] = static_cast<int32_t>(input);
    }
  }
  const CodePanels w(packed, weight.in, weight.out);
  at::parallel_for(0, w.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; panel++) pack_code_panel(to + header.data, w, weight, panel, gated);
  });
  return packed;
}

}  // namespace millrace
