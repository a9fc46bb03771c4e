"""Weights of codes, against the elements computed one by one."""

from __future__ import annotations

import torch

from millrace_shard.kernels.quantized import QuantizedTensor


def test_elements_are_scaled_values_with_offsets_in_the_order_of_inputs() -> None:
    generator = torch.Generator().manual_seed(1)
    outputs, inputs, group_size = 5, 22, 8
    groups = 3
    tensor = QuantizedTensor(
        codes=torch.randint(16, (outputs, inputs), generator=generator, dtype=torch.uint8),
        values=torch.randn(16, generator=generator),
        scales=torch.rand(outputs, groups, generator=generator),
        offsets=torch.randn(outputs, groups, generator=generator),
        group_size=group_size,
        input_order=torch.randperm(inputs, generator=generator),
    )
    assert tensor.shape == (outputs, inputs)
    assert tensor.bits == 4
    weight = tensor.dequantized()
    assert tensor.offsets is not None
    assert tensor.input_order is not None
    for row in range(outputs):
        for column in range(inputs):
            group = column // group_size
            value = tensor.values[int(tensor.codes[row, column])]
            expected = tensor.scales[row, group] * value + tensor.offsets[row, group]
            assert weight[row, int(tensor.input_order[column])] == expected
