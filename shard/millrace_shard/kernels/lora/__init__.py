"""LoRA adapters of the linears of a model: which adapter a row has, and what it adds to the outputs of a linear.

Entry points: `adapter_table.AdapterTable`, `adapter_table.LoraSite`, `adapted_linear.adapted`.
Imports: arrays, device, kernels.
"""
