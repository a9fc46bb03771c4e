// The packed weights of all experts of a linear, of which each may have another form.
#pragma once

#include <ATen/ops/empty.h>

#include "packed_weight.h"

namespace millrace {

// The weight of one expert: panels in bfloat16, or panels of codes.
struct ExpertWeight {
  Panels plain{nullptr, 0, 0};
  CodePanels coded;

  ExpertWeight(const at::Tensor& packed, int64_t in, int64_t out) {
    if (packed.scalar_type() == at::kBFloat16) {
      plain = Panels(packed, at::empty({0}, packed.options()), in, out);
    } else {
      coded = CodePanels(packed, in, out);
    }
  }

  bool is_coded() const { return coded.header != nullptr; }
  int64_t count() const { return is_coded() ? coded.count : plain.count; }
  int64_t grain() const { return is_coded() ? coded.grain() : plain.grain(); }
  int64_t bytes() const { return is_coded() ? coded.count * coded.panel_bytes : plain.count * plain.bytes(); }
  const char* data() const { return reinterpret_cast<const char*>(is_coded() ? static_cast<const void*>(coded.data) : plain.weights); }
};

// A table that is read anew by each call. The memory of the weights belongs to the packed tensors.
class ExpertTable {
 public:
  // Writes the table of `packed` weights [out, in], one of each expert.
  static at::Tensor make(at::TensorList packed, int64_t in, int64_t out) {
    Head head{static_cast<int64_t>(packed.size()), in, out, {}};
    std::vector<ExpertWeight> weights;
    for (const at::Tensor& each : packed) {
      weights.emplace_back(each, in, out);
      if (weights.back().is_coded()) head.sizes.add(weights.back().coded);
    }
    at::Tensor table = at::empty({bytes(head.experts)}, at::TensorOptions().dtype(at::kByte));
    uint8_t* to = table.mutable_data_ptr<uint8_t>();
    std::memcpy(to, &head, sizeof head);
    std::memcpy(to + sizeof head, weights.data(), weights.size() * sizeof(ExpertWeight));
    return table;
  }

  // A table of `experts` weights [out, in]; the biases [experts, out] bfloat16 may be empty.
  ExpertTable(const at::Tensor& table, const at::Tensor& biases, int64_t experts, int64_t in, int64_t out)
      : head_(head_of(table)),
        weights_(reinterpret_cast<const ExpertWeight*>(&head_ + 1)),
        bias_(biases.numel() == 0 ? nullptr : biases.const_data_ptr<BFloat16>()) {
    TORCH_CHECK(head_.experts == experts && head_.in == in && head_.out == out, "millrace: experts of another shape");
    TORCH_CHECK(biases.is_contiguous() && (biases.numel() == 0 || biases.numel() == experts * out));
  }

  static int64_t outputs_of(const at::Tensor& table) { return head_of(table).out; }

  const ExpertWeight& of(int64_t expert) const { return weights_[expert]; }
  const BFloat16* bias_of(int64_t expert) const { return bias_ == nullptr ? nullptr : bias_ + expert * head_.out; }
  // What prepared rows of any expert take; nothing if all multiply rows as they are.
  const RowSizes& sizes() const { return head_.sizes; }

 private:
  struct alignas(64) Head {
    int64_t experts, in, out;
    RowSizes sizes;
  };
  static_assert(std::is_trivially_copyable_v<ExpertWeight> && alignof(ExpertWeight) <= alignof(Head));

  static int64_t bytes(int64_t experts) {
    return static_cast<int64_t>(sizeof(Head)) + experts * static_cast<int64_t>(sizeof(ExpertWeight));
  }

  static const Head& head_of(const at::Tensor& table) {
    TORCH_CHECK(table.scalar_type() == at::kByte && table.is_contiguous() && table.numel() >= bytes(1));
    const Head& head = *reinterpret_cast<const Head*>(table.const_data_ptr<uint8_t>());
    TORCH_CHECK(table.numel() == bytes(head.experts), "millrace: not a table of experts");
    return head;
  }

  const Head& head_;
  const ExpertWeight* weights_;
  const BFloat16* bias_;
};

inline at::Tensor expert_table(at::TensorList packed, int64_t in, int64_t out) {
  return ExpertTable::make(packed, in, out);
}

}  // namespace millrace
