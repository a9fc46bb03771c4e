"""How a model's linears are quantised, found before its weights are read.

Entry points: `quantization.quantization_of`, `code_formats.code_formats`. May import: models/spec.
"""
