"""Runs classes of `transformers` on our paged KV cache.

Entry points: `transformers_loader.TransformersLoader`, `transformers_model.TransformersModel`.
"""
