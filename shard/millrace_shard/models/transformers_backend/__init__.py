"""Runs classes of `transformers` on our paged KV cache.

Entry point: `transformers_model.TransformersModel`.
"""
