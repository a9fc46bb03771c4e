"""Weights of 4 and 8 bits, independent of the file format that they come from.

Entry points: `quantized_tensor.QuantizedTensor`, `code_format.CodeFormat`.
"""
