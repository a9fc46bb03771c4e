"""One page per family of models: the fields of its config.json, and the names of its tensors.

Entry point: `registry.FAMILIES`.
Imports: errors, kernels, models.
"""
