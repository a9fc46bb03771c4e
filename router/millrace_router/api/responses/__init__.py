"""OpenAI's responses, turned into a chat and back.

Entry point: `routes.register`.
May import: api.openai, api.chat, server and below.
"""
