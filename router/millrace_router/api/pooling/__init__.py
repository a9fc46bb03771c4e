"""Embeddings and scores, in OpenAI's, TEI's, LoRAX's, vLLM's and Cohere's forms.

Entry point: `routes.register`.
Imports: api.body, api.chat, engine, errors, pooling, request, server, text, validation.
"""
