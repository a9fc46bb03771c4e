"""OpenAI's chat completions, and what every chat dialect shares.

Entry points: `routes.register`, `prepare.prepare_chat`.
May import: server and below; no other room of api.
"""
