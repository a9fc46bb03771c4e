// A part of a panel for integer products, unpacked once for all rows.
//
// A step of 32 inputs has values [8 quads, 32 outputs, 4 inputs], unsigned, of 8 bits. Codes of fewer bits are stored in
// lines of 64 bytes, for 16 outputs each: four times two lines hold the lower halves of values, of two quads each, and
// lines behind them the upper bits, the two outputs' tiles one after the other.
#pragma once

#include <type_traits>
#include <utility>

#include "codes.h"

namespace millrace {

// Integers in a vector register.
#if defined(CPU_CAPABILITY_AVX512)
using Ints = __m512i;
inline Ints load_ints(const void* from) { return _mm512_loadu_si512(from); }
inline void save_ints(void* to, Ints values) { _mm512_store_si512(to, values); }
inline Ints all_bytes(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
inline Ints all_words(int value) { return _mm512_set1_epi16(static_cast<int16_t>(value)); }
inline Ints all_ints(int32_t value) { return _mm512_set1_epi32(value); }
inline Ints both(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline Ints either(Ints a, Ints b) { return _mm512_or_si512(a, b); }
template <int kBits>
Ints shift_left(Ints values) { return _mm512_slli_epi16(values, kBits); }
template <int kBits>
Ints shift_right(Ints values) { return _mm512_srli_epi16(values, kBits); }
inline Ints add_words(Ints a, Ints b) { return _mm512_add_epi16(a, b); }
inline Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints times_256(Ints values) { return _mm512_slli_epi32(values, 8); }
inline Ints multiply_bytes(Ints values, Ints left) { return _mm512_maddubs_epi16(values, left); }
inline Ints multiply_words(Ints a, Ints b) { return _mm512_madd_epi16(a, b); }
inline Ints look_up(Ints table, Ints index) { return _mm512_shuffle_epi8(table, index); }
inline Ints load_table(const uint8_t* bytes) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
}
inline Vec to_float(Ints values) { return _mm512_cvtepi32_ps(values); }
#else
using Ints = __m256i;
inline Ints load_ints(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline void save_ints(void* to, Ints values) { _mm256_store_si256(static_cast<__m256i*>(to), values); }
inline Ints all_bytes(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }
inline Ints all_words(int value) { return _mm256_set1_epi16(static_cast<int16_t>(value)); }
inline Ints all_ints(int32_t value) { return _mm256_set1_epi32(value); }
inline Ints both(Ints a, Ints b) { return _mm256_and_si256(a, b); }
inline Ints either(Ints a, Ints b) { return _mm256_or_si256(a, b); }
template <int kBits>
Ints shift_left(Ints values) { return _mm256_slli_epi16(values, kBits); }
template <int kBits>
Ints shift_right(Ints values) { return _mm256_srli_epi16(values, kBits); }
inline Ints add_words(Ints a, Ints b) { return _mm256_add_epi16(a, b); }
inline Ints add_ints(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints times_256(Ints values) { return _mm256_slli_epi32(values, 8); }
inline Ints multiply_bytes(Ints values, Ints left) { return _mm256_maddubs_epi16(values, left); }
inline Ints multiply_words(Ints a, Ints b) { return _mm256_madd_epi16(a, b); }
inline Ints look_up(Ints table, Ints index) { return _mm256_shuffle_epi8(table, index); }
inline Ints load_table(const uint8_t* bytes) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
}
inline Vec to_float(Ints values) { return _mm256_cvtepi32_ps(values); }
#endif
constexpr int64_t kIntsBytes = sizeof(Ints);

// sums + the products of four unsigned `values` with four signed bytes of `left`, where the CPU has an instruction for it.
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512VNNI__)
#define MILLRACE_QUADS 1
inline Ints add_quads(Ints sums, Ints values, Ints left) { return _mm512_dpbusd_epi32(sums, values, left); }
#elif !defined(CPU_CAPABILITY_AVX512) && defined(__AVXVNNI__)
#define MILLRACE_QUADS 1
inline Ints add_quads(Ints sums, Ints values, Ints left) { return _mm256_dpbusd_avx_epi32(sums, values, left); }
#elif !defined(CPU_CAPABILITY_AVX512) && defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define MILLRACE_QUADS 1
inline Ints add_quads(Ints sums, Ints values, Ints left) { return _mm256_dpbusd_epi32(sums, values, left); }
#endif

#if defined(MILLRACE_QUADS)
constexpr bool kHasQuads = true;
#else
constexpr bool kHasQuads = false;
#endif

// kLanes counts of outputs, each as a pair of words.
inline Ints count_words(const uint8_t* counts) {
  alignas(64) static constexpr int8_t kUpperBytes[64] = {
      -1, 0, -1, 0, -1, 1, -1, 1, -1, 2,  -1, 2,  -1, 3,  -1, 3,  -1, 4,  -1, 4,  -1, 5,  -1, 5,  -1, 6,  -1, 6,  -1, 7,  -1, 7,
      -1, 8, -1, 8, -1, 9, -1, 9, -1, 10, -1, 10, -1, 11, -1, 11, -1, 12, -1, 12, -1, 13, -1, 13, -1, 14, -1, 14, -1, 15, -1, 15};
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_srai_epi16(look_up(load_table(counts), load_ints(kUpperBytes)), 8);
#else
  int64_t eight;
  std::memcpy(&eight, counts, sizeof eight);
  return _mm256_srai_epi16(look_up(_mm256_set1_epi64x(eight), load_ints(kUpperBytes)), 8);
#endif
}

constexpr int64_t kQuads = tiles::kDepth / 4;           // of a step
constexpr int64_t kQuadBytes = 4 * kPanelColumns;       // of all outputs of a panel
constexpr int64_t kStepValues = kQuads * kQuadBytes;    // bytes

// Calls body with 0 to kCount - 1 as compile-time constants.
template <int kCount, typename Body>
[[gnu::always_inline]] inline void repeat(const Body& body) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) __attribute__((always_inline)) {
    (body(std::integral_constant<int, kIndex>()), ...);
  }(std::make_integer_sequence<int, kCount>());
}

// The values of the codes of a step. kInteger8 also stands for those that are unpacked.
template <Codes kCodes>
class StepValues {
 public:
  static constexpr int64_t kBytes = kStepValues / 8 * (kCodes == Codes::kTable4      ? 4
                                                       : kCodes == Codes::kInteger4 ? 4
                                                       : kCodes == Codes::kInteger5 ? 5
                                                       : kCodes == Codes::kInteger6 ? 6
                                                                                    : 8);

  explicit StepValues(const CodeHeader& header) : table_(load_table(header.bytes)) {}

  // The values of the register at byte `at` of a quad.
  template <int kQuad>
  [[gnu::always_inline]] Ints quad(const uint8_t* codes, int64_t at) const {
    if constexpr (kCodes == Codes::kInteger8) return load_ints(codes + kQuad * kQuadBytes + at);
    const Ints pair = load_ints(codes + kQuad / 2 * kQuadBytes + at), low = all_bytes(0x0f);
    const Ints lower = both(kQuad % 2 == 0 ? pair : shift_right<4>(pair), low);
    if constexpr (kCodes == Codes::kTable4) return look_up(table_, lower);
    if constexpr (kUpper > 0) {
      constexpr int kFirst = kQuad * kUpper % 8;  // of the upper bits, which move to bit 4
      const uint8_t* upper = codes + kQuads * kLine + at / kLine * kUpper * kLine + at % kLine;
      const Ints bits = load_ints(upper + kQuad * kUpper / 8 * kLine);
      return either(lower, both(to_upper<kFirst>(bits), all_bytes(((1 << kUpper) - 1) << 4)));
    }
    return lower;
  }

  void unpack(const uint8_t* codes, uint8_t* to) const {
    for (int64_t at = 0; at < kQuadBytes; at += kIntsBytes)
      repeat<kQuads>([&](auto index) { save_ints(to + index() * kQuadBytes + at, quad<index()>(codes, at)); });
  }

 private:
  static constexpr int64_t kLine = 64;
  static constexpr int kUpper = kCodes == Codes::kInteger5 ? 1 : kCodes == Codes::kInteger6 ? 2 : 0;  // bits

  template <int kFirst>
  static Ints to_upper(Ints bits) {
    if constexpr (kFirst <= 4) {
      return shift_left<4 - kFirst>(bits);
    } else {
      return shift_right<kFirst - 4>(bits);
    }
  }

  Ints table_;
};

// Whether codes of a kind become values in registers, for few rows. All others are unpacked first.
inline bool unpacks_in_registers(Codes codes) { return codes == Codes::kInteger4 || codes == Codes::kInteger6; }

// Steps of one group of several.
struct IntegerRun {
  const uint8_t *values, *scales;
  int64_t step, steps, group;
  bool begins, ends;  // whether it has the first and the last step of its group
};

class IntegerPart {
 public:
  static constexpr int64_t kMostSteps = 32;
  static constexpr int64_t kBytes = kMostSteps * (kStepValues + 2 * 2 * kPanelColumns * static_cast<int64_t>(sizeof(float)));

  explicit IntegerPart(char* memory)
      : values_(reinterpret_cast<uint8_t*>(memory)),
        scales_(reinterpret_cast<float*>(memory + kMostSteps * kStepValues)),
        offsets_(scales_ + kMostSteps * 2 * kPanelColumns) {}

  // Reads steps [begin, end) of a panel; their values are the codes, until they are unpacked. Without `reads_scales`, each
  // step is a group whose scales are left behind its codes.
  void read(const CodePanels& w, int64_t panel, int64_t begin, int64_t end, bool reads_scales) {
    const uint8_t* codes = w.codes(panel, begin);
    begin_ = begin;
    is_unpacked_ = false;
    count_ = 0;
    if (w.group_steps == 1) {
      first_group_ = w.is_half ? 2 * begin : begin;
      count_ = end - begin;
      first_ = codes;
      stride_ = w.block_bytes;
      units_ = w.units(panel, first_group_);
      if (!reads_scales) return;
      return read_scales(w, panel, [&](int64_t number) { return codes + number * w.block_bytes + w.step_bytes; });
    }
    int64_t skipped = begin % w.group_steps;
    first_group_ = begin / w.group_steps;
    for (int64_t step = begin, group = first_group_; step < end; group++, skipped = 0) {
      const int64_t left = std::min(w.group_steps - skipped, w.steps - step), steps = std::min(left, end - step);
      const uint8_t* scales = codes + left * w.step_bytes;
      runs_[count_++] = {codes, scales, step, steps, group, skipped == 0, steps == left};
      codes = scales + w.scale_size + w.offset_size;
      step += steps;
    }
    read_scales(w, panel, [&](int64_t number) { return runs_[number].scales; });
  }

  // Unpacks the values of all steps into contiguous memory.
  void unpack(const CodePanels& w) {
    switch (w.header->codes) {
      case Codes::kTable4: return unpack<Codes::kTable4>(w);
      case Codes::kInteger4: return unpack<Codes::kInteger4>(w);
      case Codes::kInteger5: return unpack<Codes::kInteger5>(w);
      case Codes::kInteger6: return unpack<Codes::kInteger6>(w);
      default: return unpack<Codes::kInteger8>(w);
    }
  }

  int64_t begin() const { return begin_; }
  bool is_unpacked() const { return is_unpacked_; }
  // The number of runs, or of steps where each is a group or two.
  int64_t count() const { return count_; }
  const IntegerRun& run(int64_t i) const { return runs_[i]; }
  // The values of a step that is a group or two.
  const uint8_t* values(int64_t i) const { return first_ + i * stride_; }
  // [32] of a group, or counts of units where w.counts_units(). A missing last half of a step has scales of 0.
  const float* scales(int64_t group) const { return scales_ + (group - first_group_) * kPanelColumns; }
  const float* offsets(int64_t group) const { return offsets_ + (group - first_group_) * kPanelColumns; }
  // The units of the first step that is a group or two.
  const uint8_t* units() const { return units_; }
  // The unpacked values of all steps.
  const uint8_t* values() const { return values_; }

 private:
  // Reads the scales and the offsets of all groups, of which at(i) returns the first ones of the i-th run or step.
  template <typename At>
  void read_scales(const CodePanels& w, int64_t panel, const At& at) {
    const uint8_t* units = w.units(panel, first_group_);
    read_numbers(w, w.header->scales, at, 0, units, scales_);
    if (w.offset_size == 0) return;
    if (w.header->scales == ScaleType::kUnits) units += kUnitBytes;
    read_numbers(w, w.header->offsets, at, w.scale_size, units, offsets_);
  }

  template <typename At>
  void read_numbers(const CodePanels& w, ScaleType type, const At& at, int64_t skipped, const uint8_t* units,
                    float* to) const {
    switch (type) {
      case ScaleType::kUnits: return read_counts(w, at, skipped, units, to);
      case ScaleType::kHalf: return read_numbers<ScaleType::kHalf>(w, at, skipped, to);
      case ScaleType::kBFloat16: return read_numbers<ScaleType::kBFloat16>(w, at, skipped, to);
      default: return read_numbers<ScaleType::kFloat>(w, at, skipped, to);
    }
  }

  template <ScaleType kType, typename At>
  void read_numbers(const CodePanels& w, const At& at, int64_t skipped, float* to) const {
    const int64_t each = w.scale_size + w.offset_size, per_step = w.is_half ? 2 : 1;
    for (int64_t number = 0; number < count_; number++)
      for (int64_t group = 0; group < per_step; group++, to += kPanelColumns)
#pragma GCC unroll 4
        for (int64_t i = 0; i < kPanelColumns; i += kLanes)
          save(to + i, load_scales(at(number) + group * each + skipped, kType, i, nullptr));
  }

  template <typename At>
  void read_counts(const CodePanels& w, const At& at, int64_t skipped, const uint8_t* units, float* to) const {
    const int64_t each = w.scale_size + w.offset_size, per_step = w.is_half ? 2 : 1;
    constexpr int64_t kVectors = kPanelColumns / kLanes;
    // Where a run is longer than a step, a part has one run for each unit, or fewer.
    const int64_t per_unit = std::max<int64_t>(1, kUnitSteps / w.group_steps);
    for (int64_t begin = 0; begin < count_; begin += per_unit, units += w.unit_size) {
      Vec of_outputs[kVectors];
#pragma GCC unroll 4
      for (int64_t i = 0; i < kVectors; i++)
        of_outputs[i] = w.counts_units() ? Vec(1.f) : load_halves(units + 2 * i * kLanes);
      for (int64_t number = begin; number < std::min(count_, begin + per_unit); number++)
        for (int64_t group = 0; group < per_step; group++, to += kPanelColumns)
#pragma GCC unroll 4
          for (int64_t i = 0; i < kVectors; i++)
            save(to + i * kLanes, load_int8(at(number) + group * each + skipped + i * kLanes) * of_outputs[i]);
    }
  }

  // After that, the runs have the unpacked values.
  template <Codes kCodes>
  void unpack(const CodePanels& w) {
    const StepValues<kCodes> values(*w.header);
    uint8_t* to = values_;
    is_unpacked_ = true;
    if (w.group_steps == 1) {
      for (int64_t i = 0; i < count_; i++, to += kStepValues) values.unpack(this->values(i), to);
      first_ = values_;
      stride_ = kStepValues;
      return;
    }
    for (int64_t i = 0; i < count_; i++) {
      const uint8_t* from = std::exchange(runs_[i].values, to);
      for (int64_t step = 0; step < runs_[i].steps; step++, from += values.kBytes, to += kStepValues) values.unpack(from, to);
    }
  }

  uint8_t* values_;
  const uint8_t *first_ = nullptr, *units_ = nullptr;
  float *scales_, *offsets_;
  IntegerRun runs_[kMostSteps];
  int64_t count_ = 0, begin_ = 0, first_group_ = 0, stride_ = 0;
  bool is_unpacked_ = false;
};

}  // namespace millrace
