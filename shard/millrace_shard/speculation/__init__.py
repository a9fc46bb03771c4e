"""Draft tokens from prompt lookup, a draft model, or heads: Medusa, EAGLE, EAGLE-3, MTP layers.

Entry points: `proposer.Proposer`, `loading.SpeculationLoader`.
Imports: arrays, batch, device, errors, kernels, kernels.lora, models, models.families, weights, weights.gguf.
"""
