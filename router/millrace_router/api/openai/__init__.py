"""OpenAI's chat completions, and the parts that all chat dialects share.

Entry points: `routes.register`, `prepare.prepare_chat`.
May import: server and below; no other room of api.
"""
