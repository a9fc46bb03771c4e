"""From logits to tokens: processors, thresholds, integer sums, penalties.

Entry point: `sampler.Sampler`.
May import: kernels, device.
"""
