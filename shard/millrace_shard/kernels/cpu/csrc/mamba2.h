// Convolutions over earlier tokens, and the state space of Mamba-2.
//
// A token's bits depend only on the tokens before it in its sequence: each is computed by itself, in order.
#pragma once

#include <ATen/Parallel.h>

#include <cmath>
#include <cstring>

#include "norms.h"
#include "team.h"
#include "vectors.h"

namespace millrace {

// Channels of a convolution that a thread takes at a time.
constexpr int64_t kConvChannels = 256;

// out [rows, channels] of x; weight [kernel, channels] and bias [channels] or [0] float32; conv [pages, kernel - 1,
// channels]. Channels are a multiple of 16; all are contiguous.
void causal_conv(at::Tensor out, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, bool activate,
                 const at::Tensor& conv, const at::Tensor& pages, const at::Tensor& starts, const at::Tensor& saved) {
  constexpr int64_t kStep = 16;
  const int64_t channels = x.size(1), history = weight.size(0) - 1, sequences = pages.numel();
  TORCH_CHECK(channels % kStep == 0 && weight.size(1) == channels && out.sizes() == x.sizes());
  TORCH_CHECK(conv.size(1) == history && conv.size(2) == channels && conv.scalar_type() == x.scalar_type());
  TORCH_CHECK(x.is_contiguous() && out.is_contiguous() && conv.is_contiguous() && weight.is_contiguous());
  TORCH_CHECK(starts.numel() == sequences + 1 && (saved.numel() == 0 || saved.numel() == x.size(0)));
  TORCH_CHECK(bias.numel() == 0 || bias.numel() == channels);
  dispatch(x, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* from = x.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    T* memory = conv.mutable_data_ptr<T>();
    const float* factors = weight.const_data_ptr<float>();
    const float* added = bias.numel() ? bias.const_data_ptr<float>() : nullptr;
    const int32_t* bounds = starts.const_data_ptr<int32_t>();
    const int64_t* places = pages.const_data_ptr<int64_t>();
    const int64_t* copies = saved.numel() ? saved.const_data_ptr<int64_t>() : nullptr;
    const int64_t units = (channels + kConvChannels - 1) / kConvChannels;
    const auto run = [&](int64_t sequence, int64_t low, int64_t high) {
      const int64_t first = bounds[sequence], end = bounds[sequence + 1];
      T* earlier = memory + places[sequence] * history * channels;
      const auto input = [&](int64_t token) {
        return token >= first ? from + token * channels : earlier + (history + token - first) * channels;
      };
      // In order, since `target` may be the page that is read.
      const auto keep = [&](int64_t token, T* target) {
        for (int64_t i = 0; i < history; i++)
          std::memmove(target + i * channels + low, input(token + 1 - history + i) + low, (high - low) * sizeof(T));
      };
      for (int64_t token = first; token < end; token++) {
        for (int64_t i = low; i < high; i += kLanes) {
          Vec total = added == nullptr ? Vec(0.f) : load(added + i);
          for (int64_t j = 0; j <= history; j++)
            total = at::vec::fmadd(load(factors + j * channels + i), load(input(token - history + j) + i), total);
          save(to + token * channels + i, activate ? silu<float>(total) : total);
        }
        if (copies != nullptr && copies[token] >= 0) keep(token, memory + copies[token] * history * channels);
      }
      if (end > first) keep(end - 1, earlier);
    };
    at::parallel_for(0, sequences * units, 1, [&](int64_t begin, int64_t stop) {
      for (int64_t unit = begin; unit < stop; unit++) {
        const int64_t low = unit % units * kConvChannels;
        run(unit / units, low, std::min(channels, low + kConvChannels));
        UnitsTaken::add(at::get_thread_num());
      }
    });
  });
}

// The state of one head, [state_dim, head_dim], and what a token does to it.
struct SpaceHead {
  float* state;
  int64_t state_dim, head_dim;

  // result [head_dim] = c · (state = decay · state + b ⊗ step x) + skip x, for kCount vectors of channels from `at` on.
  template <int kCount, typename T>
  void columns(int64_t at, const T* x, const float* b, const float* c, float step, float decay, float skip,
               float* result) const {
    Vec change[kCount], total[kCount];
#pragma GCC unroll 8
    for (int v = 0; v < kCount; v++) {
      change[v] = Vec(step) * load(x + at + v * kLanes);
      total[v] = Vec(skip) * load(x + at + v * kLanes);
    }
    const Vec keep(decay);
    for (int64_t n = 0; n < state_dim; n++) {
      const Vec in(b[n]), out(c[n]);
#pragma GCC unroll 8
      for (int v = 0; v < kCount; v++) {
        float* place = state + n * head_dim + at + v * kLanes;
        const Vec now = save(place, at::vec::fmadd(in, change[v], keep * load(place)));
        total[v] = at::vec::fmadd(out, now, total[v]);
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < kCount; v++) save(result + at + v * kLanes, total[v]);
  }
};

// out [rows, heads * head_dim] float32 of mixed [rows, heads * head_dim + 2 * groups * state_dim] and dt [rows, heads];
// rates, biases and skip [heads] float32; state [pages, heads, state_dim, head_dim]. head_dim is a multiple of 16.
void mamba2(at::Tensor out, const at::Tensor& mixed, const at::Tensor& dt, const at::Tensor& rates,
            const at::Tensor& biases, const at::Tensor& skip, double least, double most, int64_t groups,
            const at::Tensor& state, const at::Tensor& pages, const at::Tensor& starts, const at::Tensor& saved) {
  constexpr int64_t kStep = 16;
  constexpr int kVectors = 4;
  const int64_t heads = state.size(1), state_dim = state.size(2), head_dim = state.size(3), sequences = pages.numel();
  const int64_t channels = mixed.size(1), inner = heads * head_dim;
  TORCH_CHECK(head_dim % kStep == 0 && heads % groups == 0 && channels == inner + 2 * groups * state_dim);
  TORCH_CHECK(mixed.is_contiguous() && dt.is_contiguous() && out.is_contiguous() && state.is_contiguous());
  TORCH_CHECK(out.scalar_type() == at::kFloat && dt.size(1) == heads && dt.scalar_type() == mixed.scalar_type());
  TORCH_CHECK(rates.numel() == heads && biases.numel() == heads && skip.numel() == heads);
  TORCH_CHECK(starts.numel() == sequences + 1 && (saved.numel() == 0 || saved.numel() == mixed.size(0)));
  dispatch(mixed, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* from = mixed.const_data_ptr<T>();
    const T* sizes = dt.const_data_ptr<T>();
    float* to = out.mutable_data_ptr<float>();
    float* memory = state.mutable_data_ptr<float>();
    const float *rate = rates.const_data_ptr<float>(), *bias = biases.const_data_ptr<float>();
    const float* past = skip.const_data_ptr<float>();
    const int32_t* bounds = starts.const_data_ptr<int32_t>();
    const int64_t* places = pages.const_data_ptr<int64_t>();
    const int64_t* copies = saved.numel() ? saved.const_data_ptr<int64_t>() : nullptr;
    const auto page_of = [&](int64_t page, int64_t head) {
      return memory + (page * heads + head) * state_dim * head_dim;
    };
    const auto run = [&](int64_t sequence, int64_t head, float* wide) {
      const SpaceHead space{page_of(places[sequence], head), state_dim, head_dim};
      const int64_t group = head / (heads / groups);
      for (int64_t token = bounds[sequence]; token < bounds[sequence + 1]; token++) {
        const T* row = from + token * channels;
        for (int64_t n = 0; n < state_dim; n++) {
          wide[n] = static_cast<float>(row[inner + group * state_dim + n]);
          wide[state_dim + n] = static_cast<float>(row[inner + (groups + group) * state_dim + n]);
        }
        const float raw = static_cast<float>(sizes[token * heads + head]) + bias[head];
        const float soft = raw > 20.f ? raw : std::log1p(std::exp(raw));
        const float step = std::min(std::max(soft, static_cast<float>(least)), static_cast<float>(most));
        const float decay = std::exp(-rate[head] * step);
        const T* x = row + head * head_dim;
        float* result = to + token * inner + head * head_dim;
        int64_t i = 0;
        for (; i + kVectors * kLanes <= head_dim; i += kVectors * kLanes)
          space.columns<kVectors>(i, x, wide, wide + state_dim, step, decay, past[head], result);
        for (; i < head_dim; i += kLanes)
          space.columns<1>(i, x, wide, wide + state_dim, step, decay, past[head], result);
        if (copies != nullptr && copies[token] >= 0)
          std::memcpy(page_of(copies[token], head), space.state, state_dim * head_dim * sizeof(float));
      }
    };
    at::parallel_for(0, sequences * heads, 1, [&](int64_t begin, int64_t end) {
      static thread_local Scratch scratch;
      float* wide = reinterpret_cast<float*>(scratch.reserve(2 * state_dim * sizeof(float)));
      for (int64_t unit = begin; unit < end; unit++) {
        run(unit / heads, unit % heads, wide);
        UnitsTaken::add(at::get_thread_num());
      }
    });
  });
}

}  // namespace millrace
