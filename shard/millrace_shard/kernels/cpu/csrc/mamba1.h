// The state space of Mamba 1: each channel has a state of its own, whose parts decay by themselves.
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

// Channels that a thread takes at a time; their states stay in the first cache.
constexpr int64_t kSpaceChannels = 64;

// out [rows, channels] float32 of x and dt [rows, channels] and matrices [rows, 2 * state_dim], of inputs and outputs;
// rates [state_dim, channels], biases and skip [channels] float32; state [pages, state_dim, channels]. Channels are a
// multiple of 16.
void mamba1(at::Tensor out, const at::Tensor& x, const at::Tensor& dt, const at::Tensor& matrices,
            const at::Tensor& rates, const at::Tensor& biases, const at::Tensor& skip, const at::Tensor& state,
            const at::Tensor& pages, const at::Tensor& starts, const at::Tensor& saved) {
  constexpr int64_t kStep = 16;
  const int64_t rows = x.size(0), channels = x.size(1), state_dim = state.size(1), sequences = pages.numel();
  TORCH_CHECK(channels % kStep == 0 && state.dim() == 3 && state.size(2) == channels);
  TORCH_CHECK(dt.sizes() == x.sizes() && out.sizes() == x.sizes() && matrices.numel() == rows * 2 * state_dim);
  for (const at::Tensor* each : {&x, &dt, &matrices, &rates, &state, &pages, &starts})
    TORCH_CHECK(each->is_contiguous(), "millrace: contiguous tensors expected");
  TORCH_CHECK(out.is_contiguous() && out.scalar_type() == at::kFloat && state.scalar_type() == at::kFloat);
  for (const at::Tensor* each : {&dt, &matrices}) TORCH_CHECK(each->scalar_type() == x.scalar_type());
  TORCH_CHECK(rates.numel() == state_dim * channels && biases.numel() == channels && skip.numel() == channels);
  TORCH_CHECK(starts.numel() == sequences + 1 && (saved.numel() == 0 || saved.numel() == rows));
  dispatch(x, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T *from = x.const_data_ptr<T>(), *sizes = dt.const_data_ptr<T>(), *both = matrices.const_data_ptr<T>();
    float *to = out.mutable_data_ptr<float>(), *memory = state.mutable_data_ptr<float>();
    const float *rate = rates.const_data_ptr<float>(), *bias = biases.const_data_ptr<float>();
    const float* past = skip.const_data_ptr<float>();
    const int32_t* bounds = starts.const_data_ptr<int32_t>();
    const int64_t* places = pages.const_data_ptr<int64_t>();
    const int64_t* copies = saved.numel() ? saved.const_data_ptr<int64_t>() : nullptr;
    const auto run = [&](int64_t sequence, int64_t first) {
      const int64_t size = std::min(kSpaceChannels, channels - first);
      float* own = memory + places[sequence] * state_dim * channels + first;
      for (int64_t token = bounds[sequence]; token < bounds[sequence + 1]; token++) {
        const T* row = both + token * 2 * state_dim;
        for (int64_t i = 0; i < size; i += kLanes) {
          const int64_t at = token * channels + first + i;
          float steps[kLanes];
          for (int64_t lane = 0; lane < kLanes; lane++) {
            const float raw = static_cast<float>(sizes[at + lane]) + bias[first + i + lane];
            steps[lane] = raw > 20.f ? raw : std::log1p(std::exp(raw));
          }
          const Vec step = load(steps), value = load(from + at), change = step * value;
          Vec total = load(past + first + i) * value;
          for (int64_t n = 0; n < state_dim; n++) {
            float* place = own + n * channels + i;
            const Vec keep = (load(rate + n * channels + first + i) * step).neg().exp();
            const Vec in(static_cast<float>(row[n])), out_(static_cast<float>(row[state_dim + n]));
            const Vec now = save(place, at::vec::fmadd(in, change, keep * load(place)));
            total = at::vec::fmadd(out_, now, total);
          }
          save(to + at, total);
        }
        if (copies != nullptr && copies[token] >= 0)
          for (int64_t n = 0; n < state_dim; n++)
            std::memcpy(memory + (copies[token] * state_dim + n) * channels + first, own + n * channels,
                        size * sizeof(float));
      }
    };
    const int64_t parts = (channels + kSpaceChannels - 1) / kSpaceChannels;
    at::parallel_for(0, sequences * parts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; unit++) {
        run(unit / parts, unit % parts * kSpaceChannels);
        UnitsTaken::add(at::get_thread_num());
      }
    });
  });
}

}  // namespace millrace
