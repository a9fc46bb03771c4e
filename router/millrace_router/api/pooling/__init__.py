"""Embeddings and scores, in OpenAI's, TEI's, LoRAX's, vLLM's and Cohere's forms.

Entry point: `routes.register`.
May import: api.chat, api.body, engine, pooling, server and below.
"""
