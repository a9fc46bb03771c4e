"""OpenAI's text completions.

Entry point: `routes.register`.
May import: api.openai, server and below.
"""
