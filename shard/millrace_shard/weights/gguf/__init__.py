"""GGUF files: one file with metadata, tokenizer and tensors in block formats, prepared as a model folder.

Entry points: `folder.prepare_gguf`, `files.GgufFiles`.
Imports: errors, kernels, weights, weights.quantized.
"""
