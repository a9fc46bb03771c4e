"""From a name to a folder, from a folder to this rank's tensors.

Entry points: `weights.Weights`, `download`.
May import: kernels, device.
"""
