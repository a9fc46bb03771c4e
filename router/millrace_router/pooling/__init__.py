"""Embeddings and scores: which of them a model has, and how its prompts are made.

Entry points: `model.pooling_of`, `prompts.tokens_of`.
Imports: errors, millrace_proto, request, text.
"""
