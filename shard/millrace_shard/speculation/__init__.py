"""Draft tokens from prompt lookup, a draft model or Medusa heads.

Entry points: `proposer.Proposer`, `loading.SpeculationLoader`.
May import: models, weights, batch, kernels, device.
"""
