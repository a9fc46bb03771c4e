// The paged KV cache: pages of 64 positions, each stored as the two right operands that brgemm takes.
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

// Keys and values of one head for consecutive slots of a page, in memory `stride` apart.
template <typename T>
struct Run {
  const T *key, *value;
  int64_t key_stride, value_stride, slot, count;
};

// Writes the page in the order of its addresses, since even one slot touches every line of it.
template <typename T>
void store_keys(T* page, const Run<T>& run, int64_t dim) {
  constexpr int64_t W = kInterleave<T>;
  for (int64_t i = 0; i < dim; i += W)
    for (int64_t t = 0; t < run.count; t++)
      std::memcpy(page + i * kPage + (run.slot + t) * W, run.key + t * run.key_stride + i, W * sizeof(T));
}

template <typename T>
void store_values(T* page, const Run<T>& run, int64_t dim) {
  constexpr int64_t W = kInterleave<T>;
  for (int64_t t = 0; t < run.count; t++) {
    const T* value = run.value + t * run.value_stride;
    T* to = page + (run.slot + t) / W * dim * W + (run.slot + t) % W;
    if (W == 2 && (run.slot + t) % 2 == 0 && t + 1 < run.count) {
      const T* odd = value + run.value_stride;
      for (int64_t i = 0; i < dim; i++) {
        to[i * W] = value[i];
        to[i * W + 1] = odd[i];
      }
      t++;
    } else {
      for (int64_t i = 0; i < dim; i++) to[i * W] = value[i];
    }
  }
}

// The location of keys and values: those of token t and head h are at t * token + h * head.
template <typename T>
struct Source {
  const T *keys, *values;
  int64_t key_token, value_token, key_head, value_head;
};

// Stores `heads` of tokens [begin, end) at their cache rows, in runs of consecutive slots of a page.
template <typename T>
void store_tokens(T* keys, T* values, const Pages& pages, const int64_t* cache_rows, const Source<T>& from,
                  int64_t begin, int64_t end, Range heads) {
  while (begin < end) {
    const int64_t first = cache_rows[begin], block = first / kPage;
    TORCH_CHECK(first >= 0 && block < pages.blocks, "millrace: cache row out of range");
    int64_t count = 1;
    while (begin + count < end && cache_rows[begin + count] == first + count && (first + count) / kPage == block) count++;
    for (int64_t head = heads.low; head < heads.high; head++) {
      const Run<T> run{from.keys + begin * from.key_token + head * from.key_head,
                       from.values + begin * from.value_token + head * from.value_head,
                       from.key_token, from.value_token, first % kPage, count};
      store_keys(keys + pages.offset(block, head), run, pages.dim);
      store_values(values + pages.offset(block, head), run, pages.dim);
    }
    begin += count;
  }
}

// Stores key and value [rows, heads, dim], whose last stride is 1, at cache_rows [rows] int64.
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
    const Source<T> from{k, v, key.stride(0), value.stride(0), key.stride(1), value.stride(1)};
    at::parallel_for(0, key.size(0), 32, [&](int64_t begin, int64_t end) {
      store_tokens(kp, vp, pages, rows, from, begin, end, {0, pages.heads});
    });
  });
}

// Rotates the pairs x[i], x[i + half] by angle i; `rope` holds `half` cosines, then `half` sines.
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

// Rotates the queries and keys of qkv [rows, (num_heads + 2 * heads) * dim], contiguous, in place; stores keys and
// values.
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
    const T* key = x + num_heads * dim;
    const Source<T> from{key, key + pages.heads * dim, width, width, dim, dim};
    at::parallel_for(0, qkv.size(0), 16, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) {
        TORCH_CHECK(position[t] >= 0 && position[t] < rope.size(0), "millrace: position out of range");
        for (int64_t head = 0; head < num_heads + pages.heads; head++)
          rotate(x + t * width + head * dim, table + position[t] * rotary, rotary / 2);
      }
      store_tokens(kp, vp, pages, rows, from, begin, end, {0, pages.heads});
    });
  });
}

}  // namespace millrace
