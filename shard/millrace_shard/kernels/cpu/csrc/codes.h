// Weights of 4 and 8 bits, packed in panels of 32 outputs. A panel is read once from end to end: the codes of a group of
// inputs are followed by the group's scales and offsets.
//
// Element (o, i) is scale[o, g] * value[code[o, i]] + offset[o, g], where g is the group of input i. With exact products,
// values are bfloat16 and codes are stored in the order of bfloat16 operands. With integer products, values are
// integers and codes are stored in the order of int8 operands.
#pragma once

#include "panels.h"

namespace millrace {

enum class Codes : int64_t {
  kTable4,    // 4 bits; a table of 16 values
  kInteger8,  // 8 bits; the value is the code minus `zero`
  kTable8,    // 8 bits; a table of 256 values
  kInteger4,  // 4 bits, of integer products; the value is the code minus `zero`
};

enum class ScaleType : int64_t { kNone, kFloat, kBFloat16, kHalf };

inline int64_t scale_bytes(ScaleType type) {
  if (type == ScaleType::kNone) return 0;
  return kPanelColumns * (type == ScaleType::kFloat ? 4 : 2);
}

// Loads kLanes scales from the i-th on.
inline Vec load_scales(const uint8_t* from, ScaleType type, int64_t i) {
  if (type == ScaleType::kFloat) return load(reinterpret_cast<const float*>(from) + i);
  if (type == ScaleType::kBFloat16) return load(reinterpret_cast<const BFloat16*>(from) + i);
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 2 * i)));
#else
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * i)));
#endif
}

// The values of a table as bfloat16 operands. Values that bfloat16 does not hold are sums of a high and a low part.
struct CodeTable {
  uint16_t parts[2][256];
};

constexpr int64_t kCodeMagic = 0x6d696c6c63646531;

// The first bytes of a packed weight.
struct alignas(64) CodeHeader {
  int64_t magic, in, out, panels;
  int64_t is_integer;   // products; else exact
  Codes codes;
  int64_t parts;        // of a table: 1 or 2
  int64_t zero;         // what is subtracted from the codes of kInteger8, and from the bytes of integer products
  int64_t group;        // inputs
  ScaleType scales, offsets;
  int64_t has_order, data;  // `data`: bytes before the first panel
  CodeTable table;
  uint8_t bytes[16];    // the table of 4-bit codes for integer products, `zero` added
};

// A packed weight. Steps are those of tiles::multiply: 32 inputs with exact products, 64 with integer products.
struct CodePanels {
  const CodeHeader* header = nullptr;
  const uint8_t* data = nullptr;
  const int32_t* order = nullptr;  // column i of the codes belongs to input order[i]; null: to input i
  int64_t count = 0, steps = 0;
  int64_t group_steps = 0;  // of a group
  int64_t groups = 0;
  bool is_half = false;     // groups are half a step; two of them share its codes
  int64_t step_bytes = 0, scale_size = 0, offset_size = 0, block_bytes = 0, panel_bytes = 0;

  CodePanels() = default;

  CodePanels(const CodeHeader& of, const uint8_t* packed)
      : header(&of),
        data(packed + of.data),
        order(of.has_order != 0 ? reinterpret_cast<const int32_t*>(packed + sizeof(CodeHeader)) : nullptr),
        count(of.panels),
        steps((of.in + depth() - 1) / depth()),
        is_half(of.group == depth() / 2 && of.in > of.group),
        step_bytes(depth() * kPanelColumns * bits() / 8),
        scale_size(scale_bytes(of.scales)),
        offset_size(scale_bytes(of.offsets)) {
    group_steps = is_half ? 1 : std::min(steps, (of.group + depth() - 1) / depth());
    groups = (of.in + of.group - 1) / of.group;
    const int64_t each = scale_size + offset_size;
    block_bytes = group_steps * step_bytes + (is_half ? 2 : 1) * each;
    const int64_t blocks = (steps + group_steps - 1) / group_steps;
    panel_bytes = steps * step_bytes + blocks * (is_half ? 2 : 1) * each;
  }

  // Reads and checks the header of a packed weight with `in` inputs and `out` outputs.
  CodePanels(const at::Tensor& packed, int64_t in, int64_t out) : CodePanels(header_of(packed), packed.const_data_ptr<uint8_t>()) {
    TORCH_CHECK(header->in == in && round_up(out, kPanelColumns) == count * kPanelColumns,
                "millrace: a weight of another shape");
    TORCH_CHECK(packed.numel() == header->data + count * panel_bytes, "millrace: a weight of another size");
  }

  static const CodeHeader& header_of(const at::Tensor& packed) {
    TORCH_CHECK(packed.scalar_type() == at::kByte && packed.is_contiguous() && packed.dim() == 1);
    TORCH_CHECK(packed.numel() >= static_cast<int64_t>(sizeof(CodeHeader)));
    const CodeHeader& found = *reinterpret_cast<const CodeHeader*>(packed.const_data_ptr<uint8_t>());
    TORCH_CHECK(found.magic == kCodeMagic, "millrace: not a packed weight of codes");
    return found;
  }

  bool is_integer() const { return header->is_integer != 0; }
  int64_t depth() const { return is_integer() ? 2 * tiles::kDepth : tiles::kDepth; }
  int64_t bits() const { return header->codes == Codes::kTable4 || header->codes == Codes::kInteger4 ? 4 : 8; }
  // Whether rows are multiplied in another form or order than they have.
  bool replaces_rows() const { return is_integer() || order != nullptr; }
  // Whether products need the sums of a row over groups.
  bool needs_sums() const { return offset_size > 0 || (is_integer() && header->zero != 0); }
  int64_t grain() const { return std::max<int64_t>(1, kGrainOfWeights / panel_bytes); }

  // The codes of the steps from `step` on, to the end of their group.
  const uint8_t* codes(int64_t panel, int64_t step) const {
    return data + panel * panel_bytes + step / group_steps * block_bytes + step % group_steps * step_bytes;
  }
  // The scales of a group; its offsets follow them.
  const uint8_t* scales(int64_t panel, int64_t group) const {
    const int64_t block = is_half ? group / 2 : group, first = block * group_steps;
    const uint8_t* end = data + panel * panel_bytes + block * block_bytes;
    end += std::min(group_steps, steps - first) * step_bytes;
    return end + (is_half ? group % 2 * (scale_size + offset_size) : 0);
  }
};

}  // namespace millrace
