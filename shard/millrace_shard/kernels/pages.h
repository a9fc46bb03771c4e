// The paged KV cache: pages of 64 positions, each page stored as the two right operands brgemm wants.
//
// bfloat16  keys [blocks, heads, dim / 2, 64, 2]   values [blocks, heads, 64 / 2, dim, 2]
// float32   keys [blocks, heads, dim, 64]          values [blocks, heads, 64, dim]
#pragma once

#include <ATen/Parallel.h>

#include <cstring>

#include "vectors.h"

namespace millrace {

constexpr int64_t kPage = 64;

struct Pages {
  int64_t blocks, heads, dim;

  Pages(const at::Tensor& keys, const at::Tensor& values)
      : blocks(keys.size(0)), heads(keys.size(1)), dim(keys.size(3)) {
    TORCH_CHECK(keys.is_contiguous() && values.is_contiguous() && keys.sizes() == values.sizes());
    TORCH_CHECK(keys.size(2) == kPage && keys.scalar_type() == values.scalar_type());
  }

  int64_t offset(int64_t block, int64_t head) const { return (block * heads + head) * kPage * dim; }
};

template <typename T>
void store_key(T* page, const T* key, int64_t slot, int64_t dim) {
  constexpr int64_t W = kInterleave<T>;
  for (int64_t i = 0; i < dim; i += W) std::memcpy(page + i * kPage + slot * W, key + i, W * sizeof(T));
}

template <typename T>
void store_value(T* page, const T* value, int64_t slot, int64_t dim) {
  constexpr int64_t W = kInterleave<T>;
  T* to = page + slot / W * dim * W + slot % W;
  for (int64_t i = 0; i < dim; i++) to[i * W] = value[i];
}

template <typename T>
void store_row(T* keys, T* values, const Pages& pages, int64_t cache_row, const T* key, const T* value,
               int64_t key_stride, int64_t value_stride) {
  TORCH_CHECK(cache_row >= 0 && cache_row < pages.blocks * kPage, "millrace: cache row out of range");
  for (int64_t head = 0; head < pages.heads; head++) {
    const int64_t at = pages.offset(cache_row / kPage, head);
    store_key(keys + at, key + head * key_stride, cache_row % kPage, pages.dim);
    store_value(values + at, value + head * value_stride, cache_row % kPage, pages.dim);
  }
}

// key, value [rows, heads, dim] with unit last stride; cache_rows [rows] int64.
void store(const at::Tensor& key, const at::Tensor& value, const at::Tensor& cache_rows, at::Tensor keys,
           at::Tensor values) {
  const Pages pages(keys, values);
  TORCH_CHECK(key.sizes() == value.sizes() && key.size(1) == pages.heads && key.size(2) == pages.dim);
  TORCH_CHECK(key.stride(2) == 1 && value.stride(2) == 1 && cache_rows.is_contiguous());
  TORCH_CHECK(cache_rows.numel() == key.size(0) && key.scalar_type() == keys.scalar_type() &&
              value.scalar_type() == keys.scalar_type());
  dispatch(key, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* k = key.const_data_ptr<T>();
    const T* v = value.const_data_ptr<T>();
    const int64_t* rows = cache_rows.const_data_ptr<int64_t>();
    T* kp = keys.mutable_data_ptr<T>();
    T* vp = values.mutable_data_ptr<T>();
    at::parallel_for(0, key.size(0), 32, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++)
        store_row(kp, vp, pages, rows[t], k + t * key.stride(0), v + t * value.stride(0), key.stride(1),
                  value.stride(1));
    });
  });
}

// Rotates x[i] with x[i + half] by angle i; `rope` holds half cosines, then half sines.
template <typename T>
void rotate(T* x, const float* rope, int64_t half) {
  const float* cosines = rope;
  const float* sines = rope + half;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Vec a = load(x + i), b = load(x + i + half), c = load(cosines + i), s = load(sines + i);
    save(x + i, a * c - b * s);
    save(x + i + half, b * c + a * s);
  }
  for (; i < half; i++) {
    const float a = static_cast<float>(x[i]), b = static_cast<float>(x[i + half]);
    x[i] = static_cast<T>(a * cosines[i] - b * sines[i]);
    x[i + half] = static_cast<T>(b * cosines[i] + a * sines[i]);
  }
}

// qkv [rows, (num_heads + 2 * heads) * dim] contiguous: queries and keys are rotated in place, keys and values stored.
void rope_store(at::Tensor qkv, const at::Tensor& rope, const at::Tensor& positions, const at::Tensor& cache_rows,
                at::Tensor keys, at::Tensor values, int64_t num_heads) {
  const Pages pages(keys, values);
  const int64_t dim = pages.dim, width = (num_heads + 2 * pages.heads) * dim, rotary = rope.size(1);
  TORCH_CHECK(qkv.is_contiguous() && qkv.size(1) == width && qkv.scalar_type() == keys.scalar_type());
  TORCH_CHECK(rope.is_contiguous() && rope.scalar_type() == at::kFloat && rotary % 2 == 0 && rotary <= dim);
  TORCH_CHECK(positions.is_contiguous() && cache_rows.is_contiguous());
  TORCH_CHECK(positions.numel() == qkv.size(0) && cache_rows.numel() == qkv.size(0));
  dispatch(qkv, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    T* x = qkv.mutable_data_ptr<T>();
    const float* table = rope.const_data_ptr<float>();
    const int64_t* position = positions.const_data_ptr<int64_t>();
    const int64_t* rows = cache_rows.const_data_ptr<int64_t>();
    T* kp = keys.mutable_data_ptr<T>();
    T* vp = values.mutable_data_ptr<T>();
    at::parallel_for(0, qkv.size(0), 16, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) {
        TORCH_CHECK(position[t] >= 0 && position[t] < rope.size(0), "millrace: position out of range");
        T* row = x + t * width;
        for (int64_t head = 0; head < num_heads + pages.heads; head++)
          rotate(row + head * dim, table + position[t] * rotary, rotary / 2);
        const T* key = row + num_heads * dim;
        store_row(kp, vp, pages, rows[t], key, key + pages.heads * dim, dim, dim);
      }
    });
  });
}

}  // namespace millrace
