"""Model files: from a name to a local folder, and from a folder to the tensors of one rank.

Entry points: `hub.resolve`, `weights.Weights`.
Imports: device, errors, kernels, millrace_proto, variables, weights.gguf, weights.quantized.
"""
