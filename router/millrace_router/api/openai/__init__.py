"""OpenAI's chats, text completions and list of models.

Entry points: `routes.register`, `completion_routes.register`.
May import: api.chat, api.body, server and below.
"""
