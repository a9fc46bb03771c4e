// Weights of 4 to 8 bits, packed in panels of 32 outputs. A panel is read once from end to end: the codes of a group of
// inputs are followed by the group's scales and offsets.
//
// Element (o, i) is scale[o, g] * value[code[o, i]] + offset[o, g], where g is the group of input i. With exact products,
// values are bfloat16 and codes are stored in the order of bfloat16 operands. With integer products, values are
// integers, codes are stored in quads of inputs, and those of few different values take fewer bits.
#pragma once

#include <vector>

#include "panels.h"

namespace millrace {

enum class Codes : int64_t {
  kTable4,    // 4 bits; a table of 16 values
  kInteger8,  // 8 bits; the value is the code minus `zero`
  kTable8,    // 8 bits; a table of 256 values
  // Of integer products; the value is the code minus `zero`.
  kInteger4,  // 4 bits
  kInteger5,  // 4 bits, and the fifth of all codes of a step after them
  kInteger6,  // 4 bits, and the fifth and the sixth of all codes of a step after them
};

inline int64_t bits_of(Codes codes) {
  switch (codes) {
    case Codes::kTable4:
    case Codes::kInteger4: return 4;
    case Codes::kInteger5: return 5;
    case Codes::kInteger6: return 6;
    default: return 8;
  }
}

// kUnits: an integer of 8 bits, which counts units. There is a unit in float16 for every kUnitInputs inputs.
enum class ScaleType : int64_t { kNone, kFloat, kBFloat16, kHalf, kUnits };

constexpr int64_t kUnitInputs = 256;
constexpr int64_t kUnitBytes = 2 * kPanelColumns;
constexpr int64_t kUnitSteps = kUnitInputs / tiles::kDepth;

inline int64_t scale_bytes(ScaleType type) {
  if (type == ScaleType::kNone) return 0;
  return kPanelColumns * (type == ScaleType::kFloat ? 4 : type == ScaleType::kUnits ? 1 : 2);
}

inline Vec load_halves(const uint8_t* from) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
}

inline Vec load_int8(const uint8_t* from) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#endif
}

// Loads kLanes scales from the i-th on. `units` are those of the inputs, if the type has any; the products are exact.
inline Vec load_scales(const uint8_t* from, ScaleType type, int64_t i, const uint8_t* units) {
  switch (type) {
    case ScaleType::kFloat: return load(reinterpret_cast<const float*>(from) + i);
    case ScaleType::kBFloat16: return load(reinterpret_cast<const BFloat16*>(from) + i);
    case ScaleType::kUnits: return load_int8(from + i) * load_halves(units + 2 * i);
    default: return load_halves(from + 2 * i);
  }
}

// The values of a table as bfloat16 operands. Values that bfloat16 does not hold are sums of a high and a low part.
struct CodeTable {
  uint16_t parts[2][256];
};

constexpr int64_t kCodeMagic = 0x6d696c6c63646532;

// The first bytes of a packed weight.
struct alignas(64) CodeHeader {
  int64_t magic, in, out, panels;
  int64_t input_parts;  // of integer products: bytes of a rounded input, 1 or 2; 0: exact products
  Codes codes;
  int64_t parts;        // of a table: 1 or 2
  int64_t zero;         // what is subtracted from the codes of kInteger8, and from the bytes of integer products
  int64_t first_code, largest;  // of integer products: the code whose byte is 0, and the largest byte
  int64_t group;        // inputs
  ScaleType scales, offsets;
  int64_t has_order, data;  // `data`: bytes before the first panel
  int64_t next;             // bytes to the header of the codes of further outputs, in another form; 0: there are none
  CodeTable table;
  uint8_t bytes[16];    // the table of 4-bit codes for integer products, `zero` added
};

// A packed weight, in steps of 32 inputs. A panel begins with its units, if it has any.
struct CodePanels {
  const CodeHeader* header = nullptr;
  const uint8_t* data = nullptr;
  const int32_t* order = nullptr;  // column i of the codes belongs to input order[i]; null: to input i
  int64_t count = 0, steps = 0;
  int64_t group_steps = 0;  // of a group
  int64_t groups = 0;
  bool is_half = false;     // groups are half a step; two of them share its codes
  int64_t step_bytes = 0, scale_size = 0, offset_size = 0, block_bytes = 0, panel_bytes = 0;
  int64_t unit_size = 0, units_bytes = 0;  // of the units of kUnitInputs inputs, and of a panel

  CodePanels() = default;

  CodePanels(const CodeHeader& of, const uint8_t* packed)
      : header(&of),
        data(packed + of.data),
        order(of.has_order != 0 ? reinterpret_cast<const int32_t*>(packed + sizeof(CodeHeader)) : nullptr),
        count(of.panels),
        steps((of.in + tiles::kDepth - 1) / tiles::kDepth),
        is_half(of.group == tiles::kDepth / 2 && of.in > of.group),
        step_bytes(tiles::kDepth * kPanelColumns * bits() / 8),
        scale_size(scale_bytes(of.scales)),
        offset_size(scale_bytes(of.offsets)) {
    group_steps = is_half ? 1 : std::min(steps, (of.group + tiles::kDepth - 1) / tiles::kDepth);
    groups = (of.in + of.group - 1) / of.group;
    const int64_t each = scale_size + offset_size;
    block_bytes = group_steps * step_bytes + (is_half ? 2 : 1) * each;
    const int64_t blocks = (steps + group_steps - 1) / group_steps;
    unit_size = kUnitBytes * ((of.scales == ScaleType::kUnits ? 1 : 0) + (of.offsets == ScaleType::kUnits ? 1 : 0));
    units_bytes = (of.in + kUnitInputs - 1) / kUnitInputs * unit_size;
    panel_bytes = units_bytes + steps * step_bytes + blocks * (is_half ? 2 : 1) * each;
  }

  // Reads and checks the header of a packed weight with `in` inputs and `out` outputs, all in one form.
  CodePanels(const at::Tensor& packed, int64_t in, int64_t out) : CodePanels(header_of(packed), packed.const_data_ptr<uint8_t>()) {
    TORCH_CHECK(header->in == in && round_up(out, kPanelColumns) == count * kPanelColumns,
                "millrace: a weight of another shape");
    TORCH_CHECK(packed.numel() == bytes() && header->next == 0, "millrace: a weight of another size");
  }

  // The forms of a packed weight with `in` inputs and `out` outputs, which follow each other.
  static std::vector<CodePanels> all_of(const at::Tensor& packed, int64_t in, int64_t out) {
    std::vector<CodePanels> forms;
    int64_t panels = 0;
    for (int64_t at = 0;;) {
      forms.emplace_back(header_of(packed, at), packed.const_data_ptr<uint8_t>() + at);
      const CodePanels& form = forms.back();
      TORCH_CHECK(form.header->in == in, "millrace: a weight of another shape");
      panels += form.count;
      const int64_t next = form.header->next;
      TORCH_CHECK(next == 0 ? packed.numel() == at + form.bytes() : next >= form.bytes() && next % kLine == 0,
                  "millrace: a weight of another size");
      if (next == 0) break;
      at += next;
    }
    TORCH_CHECK(round_up(out, kPanelColumns) == panels * kPanelColumns, "millrace: a weight of another shape");
    return forms;
  }

  // The header at byte `at`.
  static const CodeHeader& header_of(const at::Tensor& packed, int64_t at = 0) {
    TORCH_CHECK(packed.scalar_type() == at::kByte && packed.is_contiguous() && packed.dim() == 1);
    TORCH_CHECK(at >= 0 && packed.numel() - at >= static_cast<int64_t>(sizeof(CodeHeader)));
    const CodeHeader& found = *reinterpret_cast<const CodeHeader*>(packed.const_data_ptr<uint8_t>() + at);
    TORCH_CHECK(found.magic == kCodeMagic, "millrace: not a packed weight of codes");
    return found;
  }

  static constexpr int64_t kLine = 64;  // at a multiple of which headers lie
  int64_t bytes() const { return header->data + count * panel_bytes; }

  bool is_integer() const { return header->input_parts != 0; }
  // Bytes from the upper bytes of rounded inputs to the lower ones.
  int64_t lower_bytes() const { return (steps + 1) / 2 * tiles::kTile * static_cast<int64_t>(sizeof(BFloat16)); }
  int64_t bits() const { return bits_of(header->codes); }
  // Whether rows are multiplied in another form or order than they have.
  bool replaces_rows() const { return is_integer() || order != nullptr; }
  // Whether the products are those of weights in bfloat16, to which codes are widened tile by tile. On AMX the sums
  // of a step take longer to scale than to compute.
  bool is_widened() const { return tiles::on_amx() && !is_integer() && groups > 1 && group_steps == 1; }
  // Whether products need the sums of a row over groups.
  bool needs_sums() const { return (offset_size > 0 && !is_widened()) || (is_integer() && header->zero != 0); }
  // Whether the sums of integer products are multiplied with counts of units, and with the units only at the end of each
  // kUnitInputs inputs, as in all K-quants. The numbers of a step's inputs, multiplied with counts, are exact in float32.
  bool counts_units() const {
    const int64_t zero = header->zero, largest = header->largest;
    const bool counts_offsets = header->offsets == ScaleType::kUnits || header->offsets == ScaleType::kNone;
    if (header->input_parts != 1 || header->scales != ScaleType::kUnits || !counts_offsets) return false;
    if (is_half) return zero % 2 == 0 && zero <= 32 && largest - zero <= 32 && largest < 64;
    return group_steps == 1 && zero == 0 && largest < 32;
  }
  int64_t grain() const { return std::max<int64_t>(1, kGrainOfWeights / panel_bytes); }

  // The codes of the steps from `step` on, to the end of their group.
  const uint8_t* codes(int64_t panel, int64_t step) const {
    return data + panel * panel_bytes + units_bytes + step / group_steps * block_bytes + step % group_steps * step_bytes;
  }
  // The scales of a group; its offsets follow them.
  const uint8_t* scales(int64_t panel, int64_t group) const {
    const int64_t block = is_half ? group / 2 : group, first = block * group_steps;
    const uint8_t* end = data + panel * panel_bytes + units_bytes + block * block_bytes;
    end += std::min(group_steps, steps - first) * step_bytes;
    return end + (is_half ? group % 2 * (scale_size + offset_size) : 0);
  }
  // The units of a group's scales; those of its offsets follow them.
  const uint8_t* units(int64_t panel, int64_t group) const {
    return data + panel * panel_bytes + group * header->group / kUnitInputs * unit_size;
  }

  // kLanes units of a group's scales, or of its offsets, from the i-th output of the panel on.
  Vec load_unit(int64_t panel, int64_t group, bool of_offsets, int64_t i) const {
    return load_halves(units(panel, group) + (of_offsets ? kUnitBytes : 0) + 2 * i);
  }

  // kLanes scales, and offsets, of a group, from the i-th output of the panel on.
  Vec load_scale(int64_t panel, int64_t group, int64_t i) const {
    return load_scales(scales(panel, group), header->scales, i, units(panel, group));
  }
  Vec load_offset(int64_t panel, int64_t group, int64_t i) const {
    const int64_t before = header->scales == ScaleType::kUnits ? kUnitBytes : 0;
    return load_scales(scales(panel, group) + scale_size, header->offsets, i, units(panel, group) + before);
  }
};

}  // namespace millrace
