// Integer products of a few rows at a time with a part of a panel.
//
// Sums over 32 inputs, or over a group of 16, are exact. Those of a group are added one after the other, scaled as the
// row's inputs are, and then, scaled as the group is, to the row's result. Where scales count units, exact sums are
// multiplied with counts, and those of a unit's inputs are added one after the other before the unit scales them. So a
// row's bits depend neither on other rows nor on the instructions that compute the sums.
#pragma once

#include "coded_rows.h"
#include "integer_part.h"

namespace millrace {

// Bytes of inputs, or rows with one each, whose sums fit into registers.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int64_t kMostIntegerRows = 6;
#else
constexpr int64_t kMostIntegerRows = 4;
#endif

// The most rows of a weight that are multiplied at a time.
inline int64_t most_integer_rows(const CodePanels& w) { return kMostIntegerRows / w.header->input_parts; }

#if !defined(MILLRACE_QUADS)
// How many quads of products a sum of 16 bits holds, which a pair of inputs adds up to 2 * 128 * the largest value to.
// 0: values of 8 bits, whose halves are multiplied each for itself.
inline int summed_quads(int64_t largest) { return largest < 16 ? 8 : largest < 32 ? 4 : largest < 64 ? 2 : 0; }
#endif

// Where the scales and offsets of a part are: in the part, or behind the codes of each step, which is a group then.
// In float16; counts of a unit that all steps share, and those that sums are multiplied with: see CodePanels::counts_units.
enum class ScalesOf { kPart, kHalfSteps, kUnitSteps, kCounts };

// Where a single row takes scales from: one stream of memory is faster than two, unless products of bytes take longer.
inline ScalesOf scales_of_row(const CodePanels& w) {
  const CodeHeader& header = *w.header;
  const bool in_registers = header.codes == Codes::kInteger4 || (header.codes == Codes::kInteger8 && kHasQuads);
  if (w.counts_units() && unpacks_in_registers(header.codes)) return ScalesOf::kCounts;
  if (!in_registers || header.input_parts != 1 || w.group_steps != 1 || w.is_half) return ScalesOf::kPart;
  if (header.offsets != ScaleType::kNone && header.offsets != header.scales) return ScalesOf::kPart;
  if (header.scales == ScaleType::kHalf) return ScalesOf::kHalfSteps;
  return header.scales == ScaleType::kUnits ? ScalesOf::kUnitSteps : ScalesOf::kPart;
}

// A row's result so far, and the sum of a group that is not complete, for 32 outputs each.
struct RowState {
  alignas(64) float totals[kPanelColumns], sums[kPanelColumns];
};

// Everything is inlined: the sums are in registers only as long as no function takes their address.
template <Codes kCodes, int kSummed, int kParts, int kRows, ScalesOf kScales = ScalesOf::kPart>
class IntegerRows {
 public:
  // Rows from `first` on, which have their operand from `left` on.
  IntegerRows(const CodePanels& w, const CodedRows& rows, const int8_t* left, int64_t first)
      : w_(w),
        rows_(rows),
        left_(left),
        first_(first),
        stride_(rows.rounded_stride()),
        lower_(w.lower_bytes()),
        values_(*w.header) {}

  // Adds the products with a part to `states` [kRows]. As many bytes from `ahead` on as the part has are prefetched, except
  // for one row and larger groups, or scales in float16 after each step: the CPU's own prefetching is faster then.
  void operator()(const IntegerPart& part, RowState* states, const uint8_t* ahead) const {
    if constexpr (kParts == 1 && kSummed != 0)
      if (kScales == ScalesOf::kCounts || w_.counts_units())
        return w_.is_half ? add_unit<2>(part, states, ahead) : add_unit<1>(part, states, ahead);
    Vec totals[kVectors][kRows];
    each([&](int i, int row) {
      totals[i][row] = part.begin() == 0 ? Vec(0.f) : load(states[row].totals + i * kLanes);
    });
    if constexpr (kScales != ScalesOf::kPart) {
      add_whole_steps(part, totals);
    } else if (w_.is_half) {
      add_half_steps(part, totals, ahead);
    } else if (w_.group_steps == 1) {
      add_steps(part, totals, ahead);
    } else {
      add_groups(part, states, totals, kRows == 1 ? nullptr : ahead);
    }
    each([&](int i, int row) { save(states[row].totals + i * kLanes, totals[i][row]); });
  }

 private:
  static constexpr int kVectors = kPanelColumns / kLanes;
  static constexpr int kLefts = kParts * kRows;
  // Registers of values that are multiplied together with a value of the left operand.
  static constexpr int kTogether = kVectors == 2 ? 2 : kSummed == 0 ? 1
                                 : kScales != ScalesOf::kPart && kCodes == Codes::kInteger4 ? kVectors
                                                                                             : 2;
  static constexpr int64_t kRowBytes = tiles::kTileStride;
  static constexpr bool kBeginsWithStarts = kHasQuads;  // they take registers otherwise

  template <typename Body>
  [[gnu::always_inline]] static void each(const Body& body) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++)
#pragma GCC unroll 8
      for (int row = 0; row < kRows; row++) body(i, row);
  }

  const int8_t* left_of(int64_t step) const {
    return left_ + (step >> 1) * tiles::kTile * static_cast<int64_t>(sizeof(BFloat16)) + (step & 1) * tiles::kDepth;
  }

  // Prefetches the lines of `bytes` bytes, if there are any, and returns what follows them.
  static const uint8_t* prefetch(const uint8_t* ahead, int64_t bytes) {
    if (ahead == nullptr) return nullptr;
    const uint8_t* end = ahead + bytes;
    // The compiler removes a loop of intrinsics, since nothing depends on them.
    for (; ahead < end; ahead += 64) asm volatile("prefetcht1 %0" : : "m"(*ahead));
    return end;
  }

  // Calls body(vector) for the first of each kTogether vectors of the outputs.
  template <typename Body>
  [[gnu::always_inline]] static void each_vectors(const Body& body) {
    if constexpr (kVectors == kTogether) return body(0);
#pragma GCC unroll 1
    for (int vector = 0; vector < kVectors; vector += kTogether) body(vector);
  }

  // Calls add(i, row, sums) with the sums of kCount quads of a step, from the quad kFirst on, for kTogether vectors of the
  // outputs from `vector` on. They include the start `half` of the rows, if rows have starts.
  template <int kFirst, int kCount, bool kHasStarts = true, typename Add>
  [[gnu::always_inline]] void products(const uint8_t* values, int vector, const int8_t* left, const RoundedInputs* rounded,
                                       int half, const Add& add) const {
    // The compiler would keep the left operand for all vectors, and starts and scales of rows with it, which takes more
    // registers than there are. Without quads it stores sums in any case, and has fewer to do so with the latter.
    if constexpr (kVectors != kTogether && kHasQuads) asm volatile("" : "+r"(left) : : "memory");
    if constexpr (kVectors != kTogether && !kHasQuads) asm volatile("" : "+r"(left));
    Ints numbers[kTogether][kLefts];
    const auto start = [&](int row) { return all_ints(kHasStarts ? rounded[row * stride_].starts[half] : 0); };
    if constexpr (kBeginsWithStarts)
#pragma GCC unroll 8
      for (int row = 0; row < kRows; row++)
#pragma GCC unroll 4
        for (int i = 0; i < kTogether; i++) {
          if constexpr (kParts == 2) numbers[i][2 * row + 1] = all_ints(0);
          numbers[i][kParts * row] = start(row);
        }
    sum<kFirst, kCount>(values, vector * kIntsBytes, left, numbers, [](int, int part) { return all_words(part == 0 ? 1 : 16); });
    repeat<kRows>([&](auto row) __attribute__((always_inline)) {
      [[maybe_unused]] const Ints added = start(row());
      repeat<kTogether>([&](auto i) __attribute__((always_inline)) {
        Ints lower = numbers[i()][kParts * row()];
        if constexpr (kParts == 2) lower = add_ints(lower, times_256(numbers[i()][kParts * row() + 1]));
        if constexpr (!kBeginsWithStarts && kHasStarts) lower = add_ints(lower, added);
        add(vector + i(), row(), to_float(lower));
      });
    });
  }

  // A quad of a row's inputs, of which part 0 has the lowest bytes.
  Ints load_left(const int8_t* left, int number, int quad) const {
    const int8_t* at = left + number / kParts * kRowBytes + quad * 4;
    if (kParts == 2 && number % 2 == 0) at += lower_;
    int32_t bits;
    std::memcpy(&bits, at, sizeof bits);
    return all_ints(bits);
  }

  // Calls body(quad, its number among kCount, values), where quads are compile-time constants.
  template <int kFirst, int kCount, typename Body>
  [[gnu::always_inline]] void each_quad(const uint8_t* codes, int64_t at, const Body& body) const {
    repeat<kCount>([&](auto number) __attribute__((always_inline)) {
      Ints right[kTogether];
#pragma GCC unroll 4
      for (int i = 0; i < kTogether; i++)
        right[i] = values_.template quad<kFirst + number()>(codes, at + i * kIntsBytes);
      body(number, right);
    });
  }

#if defined(MILLRACE_QUADS)
  template <int kFirst, int kCount, typename Factor>
  [[gnu::always_inline]] void sum(const uint8_t* codes, int64_t at, const int8_t* left, Ints (&numbers)[kTogether][kLefts],
                                  [[maybe_unused]] const Factor& factor) const {
    each_quad<kFirst, kCount>(codes, at, [&](auto quad, const Ints(&right)[kTogether]) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int row = 0; row < kLefts; row++) {
        const Ints shared = load_left(left, row, kFirst + quad());
#pragma GCC unroll 4
        for (int i = 0; i < kTogether; i++) numbers[i][row] = add_quads(numbers[i][row], right[i], shared);
      }
    });
  }
#else
  // Sums of pairs, of 16 bits, are added to numbers, which have no start, before they could overflow, multiplied by
  // factor(i, part of the values).
  template <int kFirst, int kCount, typename Factor>
  [[gnu::always_inline]] void sum(const uint8_t* codes, int64_t at, const int8_t* left, Ints (&numbers)[kTogether][kLefts],
                                  const Factor& factor) const {
    constexpr int kHalves = kSummed == 0 ? 2 : 1;  // of a value
    constexpr int kAtOnce = kSummed == 0 ? kCount : std::min(kSummed, kCount);
    // Only indices that are constants without the unrolling of loops leave sums in registers.
    Ints pairs[kHalves][kTogether][kLefts];
    each_quad<kFirst, kCount>(codes, at, [&](auto quad, const Ints(&right)[kTogether]) __attribute__((always_inline)) {
      Ints values[kHalves][kTogether];
#pragma GCC unroll 4
      for (int i = 0; i < kTogether; i++) {
        if constexpr (kHalves == 1) {
          values[0][i] = right[i];
        } else {
          values[0][i] = both(right[i], all_bytes(0x0f));
          values[1][i] = both(shift_right<4>(right[i]), all_bytes(0x0f));
        }
      }
      repeat<kHalves * kLefts * kTogether>([&](auto number) __attribute__((always_inline)) {
        constexpr int i = number() % kTogether, row = number() / kTogether % kLefts, part = number() / kTogether / kLefts;
        Ints& sum = pairs[part][i][row];
        const Ints product = multiply_bytes(values[part][i], load_left(left, row, kFirst + quad()));
        sum = quad() % kAtOnce == 0 ? product : add_words(sum, product);
        keep_order(sum);
      });
      if constexpr (quad() % kAtOnce == kAtOnce - 1)
        repeat<kHalves * kLefts * kTogether>([&](auto number) __attribute__((always_inline)) {
          constexpr int row = number() % kLefts, i = number() / kLefts % kTogether, part = number() / kTogether / kLefts;
          const Ints sums = multiply_words(pairs[part][i][row], factor(i, part));
          numbers[i][row] = part == 0 && quad() < kAtOnce ? sums : add_ints(numbers[i][row], sums);
          keep_order(numbers[i][row]);
        });
    });
  }

  // Lets the compiler neither exchange additions nor postpone them, for which it would store many products.
  [[gnu::always_inline]] static void keep_order(Ints& sums) {
#if defined(CPU_CAPABILITY_AVX512)
    asm("" : "+v"(sums));
#else
    asm("" : "+x"(sums));
#endif
  }
#endif

  // The counts of a group, of which a step has kGroups, of its scales or its offsets, for the i-th vector of outputs.
  template <int kGroups>
  Vec count_of(const IntegerPart& part, int64_t group, bool of_offsets, int i) const {
    if constexpr (kScales == ScalesOf::kCounts) return load_int8(counts_of<kGroups>(part, group, of_offsets) + i * kLanes);
    return load((of_offsets ? part.offsets(group) : part.scales(group)) + i * kLanes);
  }
  template <int kGroups>
  const uint8_t* counts_of(const IntegerPart& part, int64_t group, bool of_offsets) const {
    const int64_t skipped = group % kGroups * (w_.scale_size + w_.offset_size) + (of_offsets ? w_.scale_size : 0);
    return part.values(group / kGroups - part.begin()) + w_.step_bytes + skipped;
  }

  // Adds the products with step `number` of a part, of kGroups groups whose counts multiply them, to `sums`.
  template <int kGroups>
  [[gnu::always_inline]] void add_counted(const IntegerPart& part, int64_t number, const RoundedInputs* rounded,
                                          Vec (&sums)[kVectors][kRows]) const {
    constexpr int kCount = kQuads / kGroups;
    const uint8_t* values = part.values(number);
    const int64_t step = part.begin() + number;
    const int8_t* left = left_of(step);
    each_vectors([&](int vector) __attribute__((always_inline)) {
      if constexpr (kScales == ScalesOf::kCounts && !kHasQuads) {
        Ints totals[kTogether];
        repeat<kGroups>([&](auto group) __attribute__((always_inline)) {
          const uint8_t* counts = counts_of<kGroups>(part, step * kGroups + group(), false) + vector * kLanes;
          Ints numbers[kTogether][kLefts];
          const auto count = [&](int i, int) { return count_words(counts + i * kLanes); };
          sum<group() * kCount, kCount>(values, vector * kIntsBytes, left, numbers, count);
          // A start is even where steps have two groups, and 0 elsewhere.
          const Ints start = all_words(rounded->starts[group()] / 2);
#pragma GCC unroll 4
          for (int i = 0; i < kTogether; i++) {
            Ints& total = totals[i];
            total = group() == 0 ? numbers[i][0] : add_ints(total, numbers[i][0]);
            if (kGroups == 2) total = add_ints(total, multiply_words(start, count(i, 0)));
          }
        });
#pragma GCC unroll 4
        for (int i = 0; i < kTogether; i++)
          sums[vector + i][0] = at::vec::fmadd(to_float(totals[i]), Vec(rounded->scale), sums[vector + i][0]);
      } else {
        Lanes totals[kTogether][kRows];
        repeat<kGroups>([&](auto group) __attribute__((always_inline)) {
          products<group() * kCount, kCount, kGroups == 2>(
              values, vector, left, rounded, group(), [&](int i, int row, const Vec& integers) {
                Lanes& total = totals[i - vector][row];
                const Vec count = count_of<kGroups>(part, step * kGroups + group(), false, i);
                total = group() == 0 ? integers * count : at::vec::fmadd(integers, count, Vec(total));
                if (group() + 1 == kGroups)
                  sums[i][row] = at::vec::fmadd(Vec(total), Vec(rounded[row * stride_].scale), sums[i][row]);
              });
        });
      }
    });
  }

  // Adds the products with a part that is a unit's inputs, or the last of them: see CodePanels::counts_units.
  template <int kGroups>
  [[gnu::always_inline]] void add_unit(const IntegerPart& part, RowState* states, const uint8_t* ahead) const {
    Vec sums[kVectors][kRows];
    each([&](int i, int row) { sums[i][row] = Vec(0.f); });
    const RoundedInputs* rounded = rows_.rounded(first_) + part.begin();
    for (int64_t number = 0; number < part.count(); number++, rounded++) {
      add_counted<kGroups>(part, number, rounded, sums);
      ahead = prefetch(ahead, w_.block_bytes);
    }
    const int64_t end = std::min(w_.groups, (part.begin() + part.count()) * kGroups);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; row++) {
      Vec of_offsets[kVectors];
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; i++) of_offsets[i] = Vec(0.f);
      if (w_.offset_size > 0)
        for (int64_t group = part.begin() * kGroups; group < end; group++) {
          const Vec inputs(rows_.sums(first_ + row)[group]);
#pragma GCC unroll 4
          for (int i = 0; i < kVectors; i++)
            of_offsets[i] = at::vec::fmadd(count_of<kGroups>(part, group, true, i), inputs, of_offsets[i]);
        }
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; i++) {
        float* to = states[row].totals + i * kLanes;
        const uint8_t* units = part.units() + 2 * i * kLanes;
        Vec total = at::vec::fmadd(sums[i][row], load_halves(units), part.begin() == 0 ? Vec(0.f) : load(to));
        if (w_.offset_size > 0) total = at::vec::fmadd(of_offsets[i], load_halves(units + kUnitBytes), total);
        save(to, total);
      }
    }
  }

  // Adds the products of steps of two groups each.
  [[gnu::always_inline]] void add_half_steps(const IntegerPart& part, Vec (&totals)[kVectors][kRows],
                                             const uint8_t* ahead) const {
    const RoundedInputs* rounded = rows_.rounded(first_) + part.begin();
    int64_t group = 2 * part.begin();
    for (int64_t number = 0; number < part.count(); number++, rounded++, group += 2) {
      const float* scales = part.scales(group);
      const uint8_t* values = part.values(number);
      const int8_t* left = left_of(part.begin() + number);
      each_vectors([&](int vector) __attribute__((always_inline)) {
        Lanes sums[kTogether][kRows];
        products<0, kQuads / 2>(values, vector, left, rounded, 0, [&](int i, int row, const Vec& integers) {
          sums[i - vector][row] = integers * load(scales + i * kLanes);
        });
        products<kQuads / 2, kQuads / 2>(values, vector, left, rounded, 1, [&](int i, int row, const Vec& integers) {
          const Vec sum = at::vec::fmadd(integers, load(scales + kPanelColumns + i * kLanes), Vec(sums[i - vector][row]));
          totals[i][row] = at::vec::fmadd(sum, Vec(rounded[row * stride_].scale), totals[i][row]);
        });
      });
      ahead = prefetch(ahead, w_.block_bytes);
      if (w_.offset_size == 0) continue;
      add_offsets(part, group, totals);
      if (group + 1 < w_.groups) add_offsets(part, group + 1, totals);
    }
  }

  // Adds the products of steps that are groups.
  [[gnu::always_inline]] void add_steps(const IntegerPart& part, Vec (&totals)[kVectors][kRows],
                                        const uint8_t* ahead) const {
    const RoundedInputs* rounded = rows_.rounded(first_) + part.begin();
    int64_t step = part.begin();
    for (int64_t number = 0; number < part.count(); number++, rounded++, step++) {
      const float* scales = part.scales(step);
      each_vectors([&](int vector) __attribute__((always_inline)) {
        products<0, kQuads>(part.values(number), vector, left_of(step), rounded, 0, [&](int i, int row, const Vec& integers) {
          const Vec sum = integers * Vec(rounded[row * stride_].scale);
          totals[i][row] = at::vec::fmadd(sum, load(scales + i * kLanes), totals[i][row]);
        });
      });
      ahead = prefetch(ahead, w_.block_bytes);
      if (w_.offset_size > 0) add_offsets(part, step, totals);
    }
  }

  // As add_steps, with the scales that are behind the codes. The CPU's own prefetching is faster for one stream of memory.
  [[gnu::always_inline]] void add_whole_steps(const IntegerPart& part, Vec (&totals)[kVectors][kRows]) const {
    constexpr int64_t kBytes = kScales == ScalesOf::kUnitSteps ? 1 : 2;
    const bool has_offsets = w_.offset_size > 0;
    Lanes units[2][kVectors] = {};
    if constexpr (kScales == ScalesOf::kUnitSteps)
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; i++) {
        units[0][i] = load_halves(part.units() + 2 * i * kLanes);
        if (has_offsets) units[1][i] = load_halves(part.units() + kUnitBytes + 2 * i * kLanes);
      }
    const auto scale = [&](const uint8_t* from, int kind, int i) __attribute__((always_inline)) {
      const uint8_t* at = from + i * kLanes * kBytes;
      return kScales == ScalesOf::kUnitSteps ? load_int8(at) * Vec(units[kind][i]) : load_halves(at);
    };
    const RoundedInputs* rounded = rows_.rounded(first_) + part.begin();
    int64_t step = part.begin();
    for (int64_t number = 0; number < part.count(); number++, rounded++, step++) {
      const uint8_t *values = part.values(number), *scales = values + w_.step_bytes;
      each_vectors([&](int vector) __attribute__((always_inline)) {
        products<0, kQuads>(values, vector, left_of(step), rounded, 0, [&](int i, int row, const Vec& integers) {
          const Vec sum = integers * Vec(rounded[row * stride_].scale);
          totals[i][row] = at::vec::fmadd(sum, scale(scales, 0, i), totals[i][row]);
        });
      });
      if (!has_offsets) continue;
      each([&](int i, int row) {
        const Vec inputs(rows_.sums(first_ + row)[step]);
        totals[i][row] = at::vec::fmadd(scale(scales + w_.scale_size, 1, i), inputs, totals[i][row]);
      });
    }
  }

  // Adds the products of groups of several steps, whose sums go on in the next part.
  [[gnu::always_inline]] void add_groups(const IntegerPart& part, RowState* states, Vec (&totals)[kVectors][kRows],
                                         const uint8_t* ahead) const {
    Vec sums[kVectors][kRows];
    each([&](int i, int row) {
      sums[i][row] = part.run(0).begins ? Vec(0.f) : load(states[row].sums + i * kLanes);
    });
    const RoundedInputs* rounded = rows_.rounded(first_) + part.begin();
    for (int64_t number = 0; number < part.count(); number++) {
      const IntegerRun& run = part.run(number);
      const uint8_t* values = run.values;
      for (int64_t step = run.step; step < run.step + run.steps; step++, values += values_.kBytes, rounded++) {
        each_vectors([&](int vector) __attribute__((always_inline)) {
          products<0, kQuads>(values, vector, left_of(step), rounded, 0, [&](int i, int row, const Vec& integers) {
            sums[i][row] = at::vec::fmadd(integers, Vec(rounded[row * stride_].scale), sums[i][row]);
          });
        });
        ahead = prefetch(ahead, w_.step_bytes);
      }
      if (!run.ends) continue;
      const float* scales = part.scales(run.group);
      each([&](int i, int row) {
        totals[i][row] = at::vec::fmadd(sums[i][row], load(scales + i * kLanes), totals[i][row]);
        sums[i][row] = Vec(0.f);
      });
      ahead = prefetch(ahead, w_.scale_size + w_.offset_size);
      if (w_.offset_size > 0) add_offsets(part, run.group, totals);
    }
    each([&](int i, int row) { save(states[row].sums + i * kLanes, sums[i][row]); });
  }

  [[gnu::always_inline]] void add_offsets(const IntegerPart& part, int64_t group,
                                          Vec (&totals)[kVectors][kRows]) const {
    const float* offsets = part.offsets(group);
    each([&](int i, int row) {
      const Vec inputs(rows_.sums(first_ + row)[group]);
      totals[i][row] = at::vec::fmadd(load(offsets + i * kLanes), inputs, totals[i][row]);
    });
  }

  const CodePanels& w_;
  const CodedRows& rows_;
  const int8_t* left_;
  const int64_t first_, stride_, lower_;
  const StepValues<kCodes> values_;
};

// Adds the products of a part with 1 to most_integer_rows(w) rows; see IntegerRows.
template <Codes kCodes, int kSummed>
void multiply_rows(const CodePanels& w, const CodedRows& rows, const int8_t* left, int64_t first, int64_t count,
                   const IntegerPart& part, RowState* states, const uint8_t* ahead, ScalesOf scales) {
  const auto multiply = [&](auto of) { IntegerRows<kCodes, kSummed, 1, 1, of()>(w, rows, left, first)(part, states, ahead); };
  if constexpr (kCodes == Codes::kInteger4 || kCodes == Codes::kInteger6)
    if (scales == ScalesOf::kCounts) return multiply(std::integral_constant<ScalesOf, ScalesOf::kCounts>());
  if constexpr (kCodes == Codes::kInteger4 || (kCodes == Codes::kInteger8 && kHasQuads)) {
    if (scales == ScalesOf::kHalfSteps) return multiply(std::integral_constant<ScalesOf, ScalesOf::kHalfSteps>());
    if (scales == ScalesOf::kUnitSteps) return multiply(std::integral_constant<ScalesOf, ScalesOf::kUnitSteps>());
  }
  const auto multiply_some = [&](auto parts) {
    dispatch_count<kMostIntegerRows / parts()>(count, [&](auto some) {
      IntegerRows<kCodes, kSummed, parts(), some()>(w, rows, left, first)(part, states, ahead);
    });
  };
  if (w.header->input_parts == 2) return multiply_some(std::integral_constant<int, 2>());
  multiply_some(std::integral_constant<int, 1>());
}

inline void multiply_integers(const CodePanels& w, const CodedRows& rows, const int8_t* left, int64_t first,
                              int64_t count, const IntegerPart& part, RowState* states, const uint8_t* ahead,
                              ScalesOf scales) {
  const auto multiply = [&](auto codes, auto summed) {
    multiply_rows<codes(), summed()>(w, rows, left, first, count, part, states, ahead, scales);
  };
  const auto unpacked = std::integral_constant<Codes, Codes::kInteger8>();
  const auto eight = std::integral_constant<int, 8>();
  if (!part.is_unpacked() && w.header->codes == Codes::kInteger4)
    return multiply(std::integral_constant<Codes, Codes::kInteger4>(), eight);
#if defined(MILLRACE_QUADS)
  if (!part.is_unpacked() && w.header->codes == Codes::kInteger6)
    return multiply(std::integral_constant<Codes, Codes::kInteger6>(), eight);
  multiply(unpacked, eight);
#else
  const auto two = std::integral_constant<int, 2>();
  if (!part.is_unpacked() && w.header->codes == Codes::kInteger6)
    return multiply(std::integral_constant<Codes, Codes::kInteger6>(), two);
  switch (summed_quads(w.header->largest)) {
    case 8: return multiply(unpacked, eight);
    case 4: return multiply(unpacked, std::integral_constant<int, 4>());
    case 2: return multiply(unpacked, two);
    default: return multiply(unpacked, std::integral_constant<int, 0>());
  }
#endif
}

}  // namespace millrace
