"""Embeddings and scores, in OpenAI's, TEI's, LoRAX's, vLLM's and Cohere's forms.

Entry points: `embedding_routes.register`, `score_routes.register`.
May import: openai, request_fields, server, engine, pooling.
"""
