"""Tokenizers, texts and chat templates.

Entry point: `texts`.
May import: the router.
"""
