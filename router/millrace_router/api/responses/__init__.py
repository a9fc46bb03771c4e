"""OpenAI's responses, turned into a chat and back.

Entry point: `routes.register`.
May import: api.chat, api.body, server and below.
"""
