"""Model files: from a name to a local folder, and from a folder to the tensors of one rank.

Entry points: `hub.resolve`, `weights.Weights`.
May import: kernels, device.
"""
