// Packs weights of 4 and 8 bits.
#pragma once

#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "codes.h"

namespace millrace {

// The integer that, times a unit, is nearest to a value.
inline float number_of_units(float value, float unit) { return unit == 0.f ? 0.f : std::nearbyint(value / unit); }

// A matrix [out, in] of codes with scales and offsets [out, groups], and their units [out, units], stored in parts [n, in].
// Offsets and units may be missing.
class CodeRows {
 public:
  CodeRows(at::TensorList codes, at::TensorList scales, at::TensorList offsets, at::TensorList scale_units,
           at::TensorList offset_units, int64_t group) {
    TORCH_CHECK(!codes.empty() && codes.size() == scales.size());
    TORCH_CHECK(offsets.empty() || offsets.size() == codes.size());
    TORCH_CHECK(scale_units.empty() || (scale_units.size() == codes.size() && kUnitInputs % group == 0));
    TORCH_CHECK(offset_units.empty() || (offset_units.size() == offsets.size() && !scale_units.empty()));
    in = codes[0].size(1);
    groups = (in + group - 1) / group;
    units_ = (in + kUnitInputs - 1) / kUnitInputs;
    per_unit_ = kUnitInputs / group;
    for (size_t i = 0; i < codes.size(); i++) {
      TORCH_CHECK(codes[i].scalar_type() == at::kByte && codes[i].dim() == 2 && codes[i].size(1) == in);
      TORCH_CHECK(codes[i].stride(1) == 1);
      check(scales[i], codes[i].size(0), groups);
      if (!offsets.empty()) check(offsets[i], codes[i].size(0), groups);
      if (!scale_units.empty()) check(scale_units[i], codes[i].size(0), units_);
      if (!offset_units.empty()) check(offset_units[i], codes[i].size(0), units_);
      for (int64_t row = 0; row < codes[i].size(0); row++)
        rows_.push_back({codes[i].const_data_ptr<uint8_t>() + row * codes[i].stride(0),
                         scales[i].const_data_ptr<float>() + row * groups,
                         offsets.empty() ? nullptr : offsets[i].const_data_ptr<float>() + row * groups,
                         scale_units.empty() ? nullptr : scale_units[i].const_data_ptr<float>() + row * units_,
                         offset_units.empty() ? nullptr : offset_units[i].const_data_ptr<float>() + row * units_});
    }
    out = static_cast<int64_t>(rows_.size());
    scale_type = smallest_type([](const Row& row) { return std::pair(row.scales, row.scale_units); });
    offset_type = offsets.empty() ? ScaleType::kNone : smallest_type([](const Row& row) {
      return std::pair(row.offsets, row.offset_units);
    });
  }

  struct Row {
    const uint8_t* codes = nullptr;
    const float *scales = nullptr, *offsets = nullptr, *scale_units = nullptr, *offset_units = nullptr;
  };

  // The row of an output; all null past the last one.
  Row row(int64_t output) const { return output < out ? rows_[output] : Row(); }

  // The smallest and the largest code, or all codes as soon as they need more than six bits.
  std::pair<uint8_t, uint8_t> code_range() const {
    uint8_t low = 255, high = 0;
    for (const Row& row : rows_) {
      for (int64_t i = 0; i < in; i++) {
        low = std::min(low, row.codes[i]);
        high = std::max(high, row.codes[i]);
      }
      if (high - low >= 64) return {0, 255};
    }
    return {low, high};
  }

  int64_t in = 0, out = 0, groups = 0;
  ScaleType scale_type, offset_type;

 private:
  static void check(const at::Tensor& scales, int64_t rows, int64_t columns) {
    TORCH_CHECK(scales.scalar_type() == at::kFloat && scales.is_contiguous() && scales.dim() == 2);
    TORCH_CHECK(scales.size(0) == rows && scales.size(1) == columns, "millrace: not one scale per output and group");
  }

  // The smallest type that holds all numbers, which are of(row).first, exactly; of(row).second are their units.
  template <typename Of>
  ScaleType smallest_type(const Of& of) const {
    bool fits_bfloat16 = true, fits_half = true, fits_units = true;
    for (const Row& row : rows_) {
      const auto [values, units] = of(row);
      fits_units = fits_units && units != nullptr;
      for (int64_t group = 0; group < groups; group++) {
        const float value = values[group];
        fits_bfloat16 = fits_bfloat16 && static_cast<float>(BFloat16(value)) == value;
        fits_half = fits_half && static_cast<float>(c10::Half(value)) == value;
        fits_units = fits_units && counts(value, units[group / per_unit_]);
      }
    }
    if (fits_units) return ScaleType::kUnits;
    return fits_bfloat16 ? ScaleType::kBFloat16 : fits_half ? ScaleType::kHalf : ScaleType::kFloat;
  }

  // Whether a value is a unit, which float16 holds, times an integer of 8 bits.
  static bool counts(float value, float unit) {
    const float number = number_of_units(value, unit);
    return static_cast<float>(c10::Half(unit)) == unit && -128.f <= number && number <= 127.f && number * unit == value;
  }

  std::vector<Row> rows_;
  int64_t units_ = 0, per_unit_ = 1;
};

// Packs the codes of 16 outputs and one step for exact products. A line of 64 bytes has the codes of several operand
// registers: lane e of register j has its code at bit `bits * j` of lane e of the line.
inline void pack_code_tile(uint8_t* to, const CodePanels& w, const CodeRows::Row* rows, int64_t step) {
  const int64_t bits = w.bits(), per_line = 16 / bits, lines = 16 / per_line;
  std::memset(to, 0, 64 * lines);
  for (int64_t line = 0; line < lines; line++)
    for (int64_t lane = 0; lane < 32; lane++) {
      const CodeRows::Row& row = rows[lane / 2];
      if (row.codes == nullptr) continue;
      uint32_t packed = 0;
      for (int64_t j = 0; j < per_line; j++) {
        const int64_t input = step * tiles::kDepth + (line * per_line + j) * 2 + lane % 2;
        if (input < w.header->in) packed |= static_cast<uint32_t>(row.codes[input]) << (bits * j);
      }
      std::memcpy(to + line * 64 + lane * 2, &packed, 2);
    }
}

// Packs the codes of 32 outputs and one step for integer products; see IntegerPart.
inline void pack_integer_step(uint8_t* to, const CodePanels& w, const CodeRows::Row* rows, int64_t step) {
  std::memset(to, 0, w.step_bytes);
  const int64_t bits = w.bits();
  for (int64_t output = 0; output < kPanelColumns; output++) {
    if (rows[output].codes == nullptr) continue;
    for (int64_t i = 0; i < std::min(tiles::kDepth, w.header->in - step * tiles::kDepth); i++) {
      const int code = rows[output].codes[step * tiles::kDepth + i] - static_cast<int>(w.header->first_code);
      const int64_t quad = i / 4, lane = output % tiles::kColumns * 4 + i % 4, tile = output / tiles::kColumns;
      if (bits == 8) {
        to[(2 * quad + tile) * 64 + lane] = static_cast<uint8_t>(code);
        continue;
      }
      to[(quad / 2 * 2 + tile) * 64 + lane] |= static_cast<uint8_t>((code & 15) << (quad % 2 * 4));
      uint8_t* upper = to + 512 + (tile * (bits - 4) + quad * (bits - 4) / 8) * 64;
      if (bits > 4) upper[lane] |= static_cast<uint8_t>((code >> 4) << (quad * (bits - 4) % 8));
    }
  }
}

// Stores one number of 32 outputs as `type`, whose unit, if it has any, is `unit`.
inline void pack_scale(uint8_t* to, ScaleType type, int64_t i, float value, float unit) {
  if (type == ScaleType::kFloat) {
    std::memcpy(to + 4 * i, &value, 4);
  } else if (type == ScaleType::kUnits) {
    to[i] = static_cast<uint8_t>(static_cast<int8_t>(number_of_units(value, unit)));
  } else {
    const uint16_t bits = type == ScaleType::kBFloat16 ? BFloat16(value).x : c10::Half(value).x;
    std::memcpy(to + 2 * i, &bits, 2);
  }
}

// Stores the units of a panel, of the scales and then of the offsets for every kUnitInputs inputs.
inline void pack_units(uint8_t* to, const CodePanels& w, const CodeRows::Row* rows) {
  std::memset(to, 0, w.units_bytes);
  if (w.unit_size == 0) return;
  for (int64_t unit = 0; unit < w.units_bytes / w.unit_size; unit++)
    for (int64_t i = 0; i < kPanelColumns; i++) {
      uint8_t* place = to + unit * w.unit_size;
      if (rows[i].codes == nullptr) continue;
      if (w.header->scales == ScaleType::kUnits) {
        pack_scale(place, ScaleType::kHalf, i, rows[i].scale_units[unit], 0.f);
        place += kUnitBytes;
      }
      if (w.header->offsets == ScaleType::kUnits)
        pack_scale(place, ScaleType::kHalf, i, rows[i].offset_units[unit], 0.f);
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
  for (int64_t step = 0; step < w.steps; step++) {
    uint8_t* to = writable(w.codes(panel, step));
    if (w.is_integer()) {
      pack_integer_step(to, w, rows, step);
      continue;
    }
    for (int64_t half = 0; half < 2; half++)
      pack_code_tile(to + half * w.step_bytes / 2, w, rows + half * tiles::kColumns, step);
  }
  const int64_t slots = w.is_half ? 2 * w.steps : w.groups;
  for (int64_t group = 0; group < slots; group++) {
    uint8_t* scales = writable(w.scales(panel, group));
    std::memset(scales, 0, w.scale_size + w.offset_size);
    if (group >= w.groups) continue;
    for (int64_t i = 0; i < kPanelColumns; i++) {
      if (rows[i].codes == nullptr) continue;
      const auto unit_of = [&](const float* units) { return units == nullptr ? 0.f : units[group * w.header->group / kUnitInputs]; };
      pack_scale(scales, weight.scale_type, i, rows[i].scales[group], unit_of(rows[i].scale_units));
      if (rows[i].offsets != nullptr)
        pack_scale(scales + w.scale_size, weight.offset_type, i, rows[i].offsets[group], unit_of(rows[i].offset_units));
    }
  }
  pack_units(writable(w.units(panel, 0)), w, rows);
}

// Completes a header for integer products of values that are the codes minus `zero`, or 16 small integers. The codes of a
// weight are in `range`.
inline void set_integers(CodeHeader& header, const float* values, int64_t size, bool is_shifted,
                         std::pair<uint8_t, uint8_t> range) {
  if (is_shifted) {
    header.first_code = range.first;
    header.zero -= range.first;
    header.largest = range.second - range.first;
    header.codes = header.largest < 16   ? Codes::kInteger4
                   : header.largest < 32 ? Codes::kInteger5
                   : header.largest < 64 ? Codes::kInteger6
                                         : Codes::kInteger8;
    return;
  }
  TORCH_CHECK(size == 16, "millrace: no integer products of these values");
  const auto [least, most] = std::minmax_element(values, values + size);
  header.zero = static_cast<int64_t>(-*least);
  header.largest = static_cast<int64_t>(*most - *least);
  TORCH_CHECK(header.largest < 256, "millrace: integer products need small values");
  for (int64_t code = 0; code < size; code++) {
    TORCH_CHECK(values[code] == std::floor(values[code]), "millrace: integer products need integer values");
    header.bytes[code] = static_cast<uint8_t>(values[code] - *least);
  }
}

// Fills the tables of a header from `values` [16 or 256] float32, for codes in `range`. Integer values are codes minus a
// constant, or small integers in a table of 16.
inline void set_table(CodeHeader& header, const at::Tensor& values, std::pair<uint8_t, uint8_t> range) {
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
  header.codes = size == 16 ? Codes::kTable4 : is_shifted ? Codes::kInteger8 : Codes::kTable8;
  header.zero = is_shifted ? static_cast<int64_t>(-from[0]) : 0;
  if (header.input_parts != 0) set_integers(header, from, size, is_shifted, range);
}

// Packs the codes of a weight; see CodePanels. `group` is 16 inputs, a multiple of 32, or at least all inputs. `order`
// int64 [in] may be empty. If `gated`, panels are laid out as by pack_panels. With `scale_units` and `offset_units`
// [out, units] float32, scales and offsets that are units times integers of 8 bits are stored so. `input_parts`: see
// CodeHeader.
inline at::Tensor pack_codes(at::TensorList codes, const at::Tensor& values, at::TensorList scales,
                             at::TensorList offsets, int64_t group, const at::Tensor& order, bool gated,
                             int64_t input_parts, at::TensorList scale_units, at::TensorList offset_units) {
  const CodeRows weight(codes, scales, offsets, scale_units, offset_units, group);
  TORCH_CHECK(!gated || weight.out % kPanelColumns == 0, "millrace: gates come in multiples of 16");
  CodeHeader header{};
  header.magic = kCodeMagic;
  header.in = weight.in;
  header.out = weight.out;
  header.panels = round_up(weight.out, kPanelColumns) / kPanelColumns;
  TORCH_CHECK(0 <= input_parts && input_parts <= 2, "millrace: inputs of integer products have one or two bytes");
  header.input_parts = input_parts;
  // Codes of 4 bits are not looked at: they take 4 bits in any case.
  using CodeRange = std::pair<uint8_t, uint8_t>;
  set_table(header, values, input_parts > 0 && values.numel() == 256 ? weight.code_range() : CodeRange{0, 15});
  header.group = group;
  header.scales = weight.scale_type;
  header.offsets = weight.offset_type;
  header.has_order = order.numel() == 0 ? 0 : 1;
  header.data = sizeof(CodeHeader) + (header.has_order != 0 ? round_up(weight.in * 4, 64) : 0);
  TORCH_CHECK(group >= weight.in || group % tiles::kDepth == 0 || group == tiles::kDepth / 2,
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

// One weight of several with equal inputs, whose outputs follow each other; those of all but the last fill their panels.
inline at::Tensor join_codes(at::TensorList packed) {
  int64_t bytes = 0;
  for (const at::Tensor& each : packed) {
    const CodeHeader& header = CodePanels::header_of(each);
    TORCH_CHECK(header.next == 0 && header.in == CodePanels::header_of(packed[0]).in, "millrace: weights that do not join");
    TORCH_CHECK(&each == &packed.back() || header.out == header.panels * kPanelColumns, "millrace: a panel that is not full");
    bytes = round_up(bytes, CodePanels::kLine) + each.numel();
  }
  TORCH_CHECK(bytes > 0, "millrace: no weights to join");
  at::Tensor joined = WeightMemory::empty({bytes}, packed[0].options());
  uint8_t* to = joined.mutable_data_ptr<uint8_t>();
  for (const at::Tensor& each : packed) {
    const int64_t next = round_up(each.numel(), CodePanels::kLine);
    std::memcpy(to, each.const_data_ptr<uint8_t>(), each.numel());
    if (&each == &packed.back()) break;
    std::memset(to + each.numel(), 0, next - each.numel());
    reinterpret_cast<CodeHeader*>(to)->next = next;
    to += next;
  }
  return joined;
}

}  // namespace millrace
