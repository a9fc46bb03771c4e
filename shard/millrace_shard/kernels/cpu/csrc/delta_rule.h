// The gated delta rule: a convolution, a state per value head that every token changes, and the norm of its output.
//
// A token's bits depend only on the tokens before it in its sequence: each is computed by itself, in order, and sums run
// over the channels of keys in one order.
#pragma once

#include <ATen/Parallel.h>

#include <cmath>
#include <cstring>
#include <type_traits>

#include "norms.h"
#include "team.h"
#include "vectors.h"

namespace millrace {

// With kByChannel each channel of keys has its own decay, and norm and gate, a sigmoid, are multiplied before rounding.
template <typename T, bool kByChannel>
struct DeltaRule {
  // Tokens whose inputs and outputs are in scratch memory at a time.
  static constexpr int64_t kPiece = 64;
  // Value channels whose part of a state stays in the first cache for a piece.
  static constexpr int64_t kTile = 32;
  // The most vectors of value channels that a single token changes at a time: the longer the runs, the faster is memory.
#if defined(CPU_CAPABILITY_AVX512)
  static constexpr int kWidest = 8;
#else
  static constexpr int kWidest = 4;
#endif

  T* out;          // [rows, values * value_dim]
  const T* qkv;    // [rows, channels]
  const T* z;      // [rows, values * value_dim]
  const T* b;      // [rows, values]
  const T* a;      // [rows, values], or [rows, values * key_dim]
  const float* weight;  // [kernel, channels]
  const float* rates;   // [values]
  const float* biases;  // [values], or [values * key_dim]
  const T* norm;        // [value_dim]
  float eps;
  T* conv;       // [pages, kernel - 1, channels]
  float* state;  // [pages, values, key_dim, value_dim]
  const int64_t* pages;
  const int32_t* starts;
  const int64_t* saved;  // [rows], or null
  int64_t keys, values, key_dim, value_dim, kernel, channels;

  int64_t group() const { return values / keys; }
  int64_t history() const { return kernel - 1; }
  int64_t width() const { return 2 * key_dim + group() * value_dim; }
  T* conv_page(int64_t page) const { return conv + page * history() * channels; }
  float* state_page(int64_t page, int64_t head) const {
    return state + (page * values + head) * key_dim * value_dim;
  }
  // Decays of a head, and the factors of a token: decays, then beta, for each value head.
  int64_t decays() const { return kByChannel ? key_dim : 1; }
  int64_t per_head() const { return decays() + 1; }
  int64_t scratch_floats() const {
    return key_dim * kTile + kPiece * (width() + group() * value_dim + per_head() * group());
  }

  // Calls body(channel, count, place) for the runs of channels of a key head; `place` counts within the head.
  template <typename Body>
  void runs(int64_t key, const Body& body) const {
    body(key * key_dim, key_dim, 0);
    body((keys + key) * key_dim, key_dim, key_dim);
    body(2 * keys * key_dim + key * group() * value_dim, group() * value_dim, 2 * key_dim);
  }

  // The inputs of the convolution at a token of the sequence, or before its first one.
  const T* input(int64_t first, const T* earlier, int64_t token) const {
    return token >= 0 ? qkv + (first + token) * channels : earlier + (history() + token) * channels;
  }

  // Writes the history after `token` to the page `to`, which may be that of `earlier`: it is written in order.
  void keep_inputs(int64_t key, int64_t first, const T* earlier, int64_t token, T* to) const {
    runs(key, [&](int64_t channel, int64_t count, int64_t) {
      for (int64_t i = 0; i < history(); i++)
        std::memmove(to + i * channels + channel, input(first, earlier, token + 1 - history() + i) + channel,
                     count * sizeof(T));
    });
  }

  // Convolution and activation of a token, rounded to T, to mixed [width].
  void mix(int64_t key, int64_t first, const T* earlier, int64_t token, float* mixed) const {
    runs(key, [&](int64_t channel, int64_t count, int64_t place) {
      for (int64_t i = 0; i < count; i += kLanes) {
        Vec total(0.f);
        for (int64_t j = 0; j < kernel; j++)
          total = at::vec::fmadd(load(weight + j * channels + channel + i),
                                 load(input(first, earlier, token - history() + j) + channel + i), total);
        T rounded[kLanes];
        save(mixed + place + i, save(rounded, silu<float>(total)));
      }
    });
    normalise(mixed, 1.f / std::sqrt(static_cast<float>(key_dim)));
    normalise(mixed + key_dim, 1.f);
  }

  void normalise(float* x, float factor) const {
    constexpr float kEpsilon = 1e-6f;
    const Vec scale(factor / std::sqrt(sum_of_squares(x, key_dim) + kEpsilon));
    for (int64_t i = 0; i < key_dim; i += kLanes) save(x + i, load(x + i) * scale);
  }

  // `kCount` vectors of value channels of one head, whose rows are `step` apart, for `count` tokens, or one with kIsOne.
  // What a token knows of its value is summed up while the token before it changes the state, in the same order as
  // without one.
  template <int kCount, bool kIsOne = false>
  void columns(float* s, int64_t step, const float* mixed, int64_t value_at, const float* factors, float* to,
               int64_t count) const {
    Vec known[kCount];
#pragma GCC unroll 8
    for (int v = 0; v < kCount; v++) known[v] = Vec(0.f);
    for (int64_t i = 0; i < key_dim; i++)
#pragma GCC unroll 8
      for (int v = 0; v < kCount; v++)
        known[v] = at::vec::fmadd(Vec(kByChannel ? mixed[key_dim + i] * factors[i] : mixed[key_dim + i]),
                                  load(s + i * step + v * kLanes), known[v]);
    for (int64_t t = 0; t < count; t++) {
      const float* q = mixed + t * width();
      const float* k = q + key_dim;
      const float* own = factors + per_head() * group() * t;
      const float* next = t + 1 < count ? k + width() : k;
      const float* next_own = t + 1 < count ? own + per_head() * group() : own;
      const Vec decay(own[0]), beta(own[decays()]);
      Vec result[kCount], change[kCount];
#pragma GCC unroll 8
      for (int v = 0; v < kCount; v++) {
        change[v] = (load(q + value_at + v * kLanes) - (kByChannel ? known[v] : decay * known[v])) * beta;
        known[v] = result[v] = Vec(0.f);
      }
      for (int64_t i = 0; i < key_dim; i++) {
        const Vec key(k[i]), query(q[i]), later(kByChannel ? next[i] * next_own[i] : next[i]);
        const Vec kept = kByChannel ? Vec(own[i]) : decay;
#pragma GCC unroll 8
        for (int v = 0; v < kCount; v++) {
          float* place = s + i * step + v * kLanes;
          const Vec now = save(place, at::vec::fmadd(key, change[v], kept * load(place)));
          result[v] = at::vec::fmadd(query, now, result[v]);
          if constexpr (!kIsOne) known[v] = at::vec::fmadd(later, now, known[v]);
        }
      }
#pragma GCC unroll 8
      for (int v = 0; v < kCount; v++) save(to + t * group() * value_dim + v * kLanes, result[v]);
    }
  }

  // The value channels of one head from `first` on, for one token.
  template <int kCount>
  void one_token(int64_t first, float* s, const float* mixed, int64_t value_at, const float* factors, float* to) const {
    for (; first + kCount * kLanes <= value_dim; first += kCount * kLanes)
      columns<kCount, true>(s + first, value_dim, mixed, value_at + first, factors, to + first, 1);
    if constexpr (kCount > 1) one_token<kCount / 2>(first, s, mixed, value_at, factors, to);
  }

  // All value channels of one head. Over several tokens each part of the state is in `tile` meanwhile: rows as far apart
  // as they are in a page would share few sets of the first cache.
  void head(float* s, const float* mixed, int64_t value_at, const float* factors, float* to, int64_t count,
            float* tile) const {
    if (count == 1) return one_token<kWidest>(0, s, mixed, value_at, factors, to);
    const auto copy = [&](float* target, int64_t apart, const float* from, int64_t step, int64_t size) {
      for (int64_t i = 0; i < key_dim; i++) std::memcpy(target + i * apart, from + i * step, size * sizeof(float));
    };
    for (int64_t i = 0; i < value_dim; i += kTile) {
      const int64_t size = std::min(kTile, value_dim - i);
      copy(tile, size, s + i, value_dim, size);
      if (size == kTile) {
        columns<kTile / kLanes>(tile, size, mixed, value_at + i, factors, to + i, count);
      } else {
        for (int64_t v = 0; v < size; v += kLanes)
          columns<1>(tile + v, size, mixed, value_at + i + v, factors, to + i + v, count);
      }
      copy(s + i, value_dim, tile, size, size);
    }
  }

  void finish(const float* result, int64_t row, int64_t head) const {
    const int64_t at = (row * values + head) * value_dim;
    T* to = out + at;
    for (int64_t i = 0; i < value_dim; i += kLanes) save(to + i, load(result + i));
    if constexpr (kByChannel) {
      const Vec inverse(1.f / std::sqrt(sum_of_squares(to, value_dim) / static_cast<float>(value_dim) + eps)), one(1.f);
      for (int64_t i = 0; i < value_dim; i += kLanes) {
        const Vec gate = one / (one + load(z + at + i).neg().exp());
        save(to + i, load(to + i) * inverse * load(norm + i) * gate);
      }
      return;
    }
    const float squares = sum_of_squares(to, value_dim) / static_cast<float>(value_dim);
    const Vec inverse(1.f / std::sqrt(squares + eps));
    for (int64_t i = 0; i < value_dim; i += kLanes) {
      const Vec scaled = save(to + i, save(to + i, load(to + i) * inverse) * load(norm + i));
      save(to + i, scaled * silu<float>(load(z + at + i)));
    }
  }

  // One key head of one sequence, with the value heads that it serves.
  void operator()(int64_t sequence, int64_t key, float* scratch) const {
    float* tile = scratch;
    float* mixed = tile + key_dim * kTile;
    float* results = mixed + kPiece * width();
    float* factors = results + kPiece * group() * value_dim;
    const int64_t first = starts[sequence], total = starts[sequence + 1] - first, page = pages[sequence];
    T* earlier = conv_page(page);
    for (int64_t done = 0; done < total;) {
      int64_t count = std::min(kPiece, total - done), to_save = -1;
      for (int64_t t = 0; saved != nullptr && t < count; t++)
        if (saved[first + done + t] >= 0) {
          to_save = saved[first + done + t];
          count = t + 1;
        }
      for (int64_t t = 0; t < count; t++) {
        mix(key, first, earlier, done + t, mixed + t * width());
        for (int64_t v = 0; v < group(); v++) {
          const int64_t head = key * group() + v, at = (first + done + t) * values + head;
          float* own = factors + per_head() * (t * group() + v);
          for (int64_t i = 0; i < decays(); i++) {
            const float x = static_cast<float>(a[at * decays() + i]) + biases[head * decays() + i];
            const float soft = x > 20.f ? x : std::log1p(std::exp(x));
            own[i] = std::exp(-rates[head] * soft);
          }
          const T beta = static_cast<T>(1.f / (1.f + std::exp(-static_cast<float>(b[at]))));
          own[decays()] = static_cast<float>(beta);
        }
      }
      for (int64_t v = 0; v < group(); v++) {
        float* s = state_page(page, key * group() + v);
        const float* own = factors + per_head() * v;
        head(s, mixed, 2 * key_dim + v * value_dim, own, results + v * value_dim, count, tile);
        for (int64_t t = 0; t < count; t++)
          finish(results + (t * group() + v) * value_dim, first + done + t, key * group() + v);
        if (to_save >= 0)
          std::memcpy(state_page(to_save, key * group() + v), s, key_dim * value_dim * sizeof(float));
      }
      done += count;
      if (to_save >= 0) keep_inputs(key, first, earlier, done - 1, conv_page(to_save));
    }
    if (total > 0) keep_inputs(key, first, earlier, total - 1, earlier);
  }
};

// Tensors as in DeltaRule, contiguous; `saved` may be empty. Dimensions of heads are multiples of 16.
void delta_rule(at::Tensor out, const at::Tensor& qkv, const at::Tensor& z, const at::Tensor& b, const at::Tensor& a,
                const at::Tensor& weight, const at::Tensor& rates, const at::Tensor& biases, const at::Tensor& norm,
                double eps, const at::Tensor& conv, const at::Tensor& state, const at::Tensor& pages, const at::Tensor& starts,
                const at::Tensor& saved) {
  constexpr int64_t kStep = 16;
  const int64_t rows = qkv.size(0), channels = qkv.size(1), values = b.size(1), sequences = pages.numel();
  TORCH_CHECK(state.dim() == 4 && state.size(1) == values && state.scalar_type() == at::kFloat);
  const int64_t key_dim = state.size(2), value_dim = state.size(3);
  const int64_t keys = (channels - values * value_dim) / (2 * key_dim);
  TORCH_CHECK(key_dim % kStep == 0 && value_dim % kStep == 0 && keys > 0 && values % keys == 0);
  TORCH_CHECK(channels == 2 * keys * key_dim + values * value_dim && weight.size(1) == channels);
  const bool by_channel = a.numel() == rows * values * key_dim;
  TORCH_CHECK(z.numel() == rows * values * value_dim && out.numel() == z.numel());
  TORCH_CHECK(a.numel() == rows * biases.numel() && (by_channel || biases.numel() == values) && rates.numel() == values);
  TORCH_CHECK(conv.size(0) == state.size(0) && conv.size(1) == weight.size(0) - 1 && conv.size(2) == channels);
  TORCH_CHECK(starts.numel() == sequences + 1 && (saved.numel() == 0 || saved.numel() == rows));
  for (const at::Tensor* each : {&qkv, &z, &b, &a, &norm, &conv, &state, &weight, &pages, &starts})
    TORCH_CHECK(each->is_contiguous(), "millrace: contiguous tensors expected");
  for (const at::Tensor* each : {&z, &b, &a, &norm, &conv}) TORCH_CHECK(each->scalar_type() == qkv.scalar_type());
  const auto run = [&](auto* type, auto kind) {
    using T = std::remove_pointer_t<decltype(type)>;
    const DeltaRule<T, decltype(kind)::value> rule{
        out.mutable_data_ptr<T>(), qkv.const_data_ptr<T>(), z.const_data_ptr<T>(), b.const_data_ptr<T>(),
        a.const_data_ptr<T>(), weight.const_data_ptr<float>(), rates.const_data_ptr<float>(),
        biases.const_data_ptr<float>(), norm.const_data_ptr<T>(), static_cast<float>(eps),
        conv.mutable_data_ptr<T>(), state.mutable_data_ptr<float>(), pages.const_data_ptr<int64_t>(),
        starts.const_data_ptr<int32_t>(), saved.numel() ? saved.const_data_ptr<int64_t>() : nullptr,
        keys, values, key_dim, value_dim, weight.size(0), channels};
    at::parallel_for(0, sequences * keys, 1, [&](int64_t begin, int64_t end) {
      static thread_local Scratch scratch;
      float* memory = reinterpret_cast<float*>(scratch.reserve(rule.scratch_floats() * sizeof(float)));
      for (int64_t unit = begin; unit < end; unit++) {
        rule(unit / keys, unit % keys, memory);
        UnitsTaken::add(at::get_thread_num());
      }
    });
  };
  dispatch(qkv, [&](auto* type) { by_channel ? run(type, std::true_type()) : run(type, std::false_type()); });
}

}  // namespace millrace
