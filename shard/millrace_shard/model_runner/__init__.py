"""Runs one step: forward pass, sampling, CUDA graphs, prompt scores.

Entry point: `runner.StepRunner`.
May import: structured_output, speculation, models, batch, sampling, kernels, device.
"""
