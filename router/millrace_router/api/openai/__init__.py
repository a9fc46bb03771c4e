"""OpenAI's chat completions, and the parts that all chat dialects share.

Entry points: `routes.register`, `prepare.prepare_chat`.
May import: api.chat, server and below.
"""
