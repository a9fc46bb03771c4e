"""TGI's own routes: generate, tokenize, info, probes, metrics.

Entry points: `routes.register`, `probes.register`.
May import: api.openai, api.chat, api.body, server and below.
"""
