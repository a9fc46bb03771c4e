"""OpenAI's text completions.

Entry point: `routes.register`.
May import: api.openai, api.chat, server and below.
"""
