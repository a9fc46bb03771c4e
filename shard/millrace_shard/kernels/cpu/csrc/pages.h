// The paged KV cache: pages of 64 positions, each stored as the two right operands that brgemm takes.
//
// bfloat16  keys [blocks, heads, dim / 2, 64, 2]   values [blocks, heads, 64 / 2, dim, 2]
// float32   keys [blocks, heads, dim, 64]          values [blocks, heads, 64, dim]
//
// Codes lie in the order of the values of the model's type. Scales of int8 are [blocks, heads, 64]. Latents are keys of
// one head, whose first `value_dim` channels are the values, too.
#pragma once

#include <ATen/Parallel.h>

#include <cstring>

#include "kv_codes.h"
#include "latents.h"

namespace millrace {

struct Pages {
  int64_t blocks, heads, dim, value_dim;
  Stored stored;
  void *keys, *values;
  float *key_scales = nullptr, *value_scales = nullptr;  // of codes; fp8 has one of each

  // `cache` holds keys and values, [blocks, heads, 64, dim] of the model's `type` or of codes, and the codes' scales.
  Pages(at::TensorList cache, at::ScalarType type)
      : blocks(cache[0].size(0)),
        heads(cache[0].size(1)),
        dim(cache[0].size(3)),
        value_dim(dim),
        stored(stored_as(cache[0].scalar_type())),
        keys(cache[0].mutable_data_ptr()),
        values(cache.size() == 1 ? nullptr : cache[1].mutable_data_ptr()) {
    TORCH_CHECK(cache[0].is_contiguous() && cache[0].size(2) == kPage);
    if (is_latent()) {
      TORCH_CHECK(heads == 1 && !has_codes() && cache[0].scalar_type() == type, "millrace: latents of heads, or as codes");
      return;
    }
    TORCH_CHECK(cache.size() == (has_codes() ? 4 : 2), "millrace: a cache without scales, or with too many tensors");
    TORCH_CHECK(cache[1].is_contiguous() && cache[0].sizes() == cache[1].sizes());
    TORCH_CHECK(cache[0].scalar_type() == cache[1].scalar_type());
    TORCH_CHECK(has_codes() || cache[0].scalar_type() == type);
    if (!has_codes()) return;
    for (const at::Tensor& scales : cache.slice(2))
      TORCH_CHECK(scales.is_contiguous() && scales.scalar_type() == at::kFloat &&
                  scales.numel() == (has_scales() ? blocks * heads * kPage : 1));
    key_scales = cache[2].mutable_data_ptr<float>();
    value_scales = cache[3].mutable_data_ptr<float>();
  }

  // Whether there are latents. Then `heads` is the number of parts of the query heads, all of which read the same pages.
  bool is_latent() const { return values == nullptr; }
  bool has_codes() const { return stored != Stored::kPlain; }
  // Whether each position and head has scales of its own.
  bool has_scales() const { return stored == Stored::kInt8; }
  // What products with all keys, and sums of all values, are multiplied by.
  float key_scale() const { return has_codes() && !has_scales() ? *key_scales : 1.f; }
  float value_scale() const { return has_codes() && !has_scales() ? *value_scales : 1.f; }
  // Bytes of the keys of a page of one head, if values as they are take `size` bytes.
  int64_t page_bytes(int64_t size) const { return kPage * dim * (has_codes() ? 1 : size); }

  int64_t scale_offset(int64_t block, int64_t head) const {
    return (is_latent() ? block : block * heads + head) * kPage;
  }
  int64_t offset(int64_t block, int64_t head) const { return scale_offset(block, head) * dim; }

  // The keys, or the values, of a page, as values of T or as codes.
  template <typename T>
  T* page(void* all, int64_t block, int64_t head) const {
    return static_cast<T*>(all) + offset(block, head);
  }
};

// Keys and values of one head for consecutive slots of a page, in memory `stride` apart.
template <typename T>
struct Run {
  const T *key, *value;
  int64_t key_stride, value_stride, slot, count;
};

// Writes the page in the order of its addresses, since even one slot touches every line of it. W positions of values,
// or channels of keys, are interleaved.
template <int64_t W, typename T>
void store_keys(T* page, const Run<T>& run, int64_t dim) {
  for (int64_t i = 0; i < dim; i += W)
    for (int64_t t = 0; t < run.count; t++)
      std::memcpy(page + i * kPage + (run.slot + t) * W, run.key + t * run.key_stride + i, W * sizeof(T));
}

template <int64_t W, typename T>
void store_values(T* page, const Run<T>& run, int64_t dim) {
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

// Encodes the keys and values of a run, and returns the run of their codes.
template <typename T>
Run<uint8_t> encode(const Pages& pages, int64_t block, int64_t head, const Run<T>& run) {
  static thread_local Scratch scratch;
  const int64_t dim = pages.dim, half = kPage * dim;
  uint8_t* const codes = reinterpret_cast<uint8_t*>(scratch.reserve(2 * half));
  for (int64_t t = 0; t < run.count; t++) {
    const T *key = run.key + t * run.key_stride, *value = run.value + t * run.value_stride;
    uint8_t *key_codes = codes + t * dim, *value_codes = key_codes + half;
    switch (pages.stored) {
      case Stored::kPlain: break;
      case Stored::kInt8: {
        const int64_t at = pages.scale_offset(block, head) + run.slot + t;
        pages.key_scales[at] = encode_int8(key_codes, key, dim);
        pages.value_scales[at] = encode_int8(value_codes, value, dim);
        break;
      }
      case Stored::kE4m3:
        encode_fp8<c10::Float8_e4m3fn>(key_codes, key, dim, *pages.key_scales);
        encode_fp8<c10::Float8_e4m3fn>(value_codes, value, dim, *pages.value_scales);
        break;
      case Stored::kE5m2:
        encode_fp8<c10::Float8_e5m2>(key_codes, key, dim, *pages.key_scales);
        encode_fp8<c10::Float8_e5m2>(value_codes, value, dim, *pages.value_scales);
        break;
    }
  }
  return {codes, codes + half, dim, dim, run.slot, run.count};
}

template <typename T>
void store_run(const Pages& pages, int64_t block, int64_t head, const Run<T>& run) {
  constexpr int64_t W = kInterleave<T>;
  if (pages.has_codes()) {
    const Run<uint8_t> codes = encode(pages, block, head, run);
    store_keys<W>(pages.page<uint8_t>(pages.keys, block, head), codes, pages.dim);
    store_values<W>(pages.page<uint8_t>(pages.values, block, head), codes, pages.dim);
  } else {
    store_keys<W>(pages.page<T>(pages.keys, block, head), run, pages.dim);
    if (!pages.is_latent()) store_values<W>(pages.page<T>(pages.values, block, head), run, pages.dim);
  }
}

// Stores `heads` of tokens [begin, end) at their cache rows, in runs of consecutive slots of a page.
template <typename T>
void store_tokens(const Pages& pages, const int64_t* cache_rows, const Source<T>& from, int64_t begin, int64_t end,
                  Range heads) {
  while (begin < end) {
    const int64_t first = cache_rows[begin], block = first / kPage;
    TORCH_CHECK(first >= 0 && block < pages.blocks, "millrace: cache row out of range");
    int64_t count = 1;
    while (begin + count < end && cache_rows[begin + count] == first + count && (first + count) / kPage == block) count++;
    for (int64_t head = heads.low; head < heads.high; head++)
      store_run<T>(pages, block, head,
                   {from.keys + begin * from.key_token + head * from.key_head,
                    from.values + begin * from.value_token + head * from.value_head, from.key_token, from.value_token,
                    first % kPage, count});
    begin += count;
  }
}

// Stores key and value [rows, heads, dim], whose last stride is 1, at cache_rows [rows] int64.
void store(const at::Tensor& key, const at::Tensor& value, const at::Tensor& cache_rows, at::TensorList cache) {
  const Pages pages(cache, key.scalar_type());
  TORCH_CHECK(key.sizes() == value.sizes() && key.size(1) == pages.heads && key.size(2) == pages.dim);
  TORCH_CHECK(key.stride(2) == 1 && value.stride(2) == 1 && cache_rows.is_contiguous());
  TORCH_CHECK(cache_rows.numel() == key.size(0) && value.scalar_type() == key.scalar_type());
  dispatch(key, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* k = key.const_data_ptr<T>();
    const T* v = value.const_data_ptr<T>();
    const int64_t* rows = cache_rows.const_data_ptr<int64_t>();
    const Source<T> from{k, v, key.stride(0), value.stride(0), key.stride(1), value.stride(1)};
    at::parallel_for(0, key.size(0), 32, [&](int64_t begin, int64_t end) {
      store_tokens(pages, rows, from, begin, end, {0, pages.heads});
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
                at::TensorList cache, int64_t num_heads) {
  const Pages pages(cache, qkv.scalar_type());
  const int64_t dim = pages.dim, width = (num_heads + 2 * pages.heads) * dim, rotary = rope.size(1);
  TORCH_CHECK(qkv.is_contiguous() && qkv.size(1) == width);
  TORCH_CHECK(rope.is_contiguous() && rope.scalar_type() == at::kFloat && rotary % 2 == 0 && rotary <= dim);
  TORCH_CHECK(positions.is_contiguous() && cache_rows.is_contiguous());
  TORCH_CHECK(positions.numel() == qkv.size(0) && cache_rows.numel() == qkv.size(0));
  dispatch(qkv, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    T* x = qkv.mutable_data_ptr<T>();
    const float* table = rope.const_data_ptr<float>();
    const int64_t* position = positions.const_data_ptr<int64_t>();
    const int64_t* rows = cache_rows.const_data_ptr<int64_t>();
    const T* key = x + num_heads * dim;
    const Source<T> from{key, key + pages.heads * dim, width, width, dim, dim};
    at::parallel_for(0, qkv.size(0), 16, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) {
        TORCH_CHECK(position[t] >= 0 && position[t] < rope.size(0), "millrace: position out of range");
        for (int64_t head = 0; head < num_heads + pages.heads; head++)
          rotate(x + t * width + head * dim, table + position[t] * rotary, rotary / 2);
      }
      store_tokens(pages, rows, from, begin, end, {0, pages.heads});
    });
  });
}

}  // namespace millrace
