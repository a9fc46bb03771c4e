"""Runs one step: forward pass, sampling, CUDA graphs, prompt scores.

Entry point: `runner.StepRunner`.
Imports: arrays, batch, device, errors, kernels, kernels.lora, models, sampling, speculation, structured_output, vision.
"""
