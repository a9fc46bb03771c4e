"""The state of running sequences, and the layout of a step over it.

Entry points: `batch.Batch`, `step.Step`.
May import: sampling, kernels, device.
"""
