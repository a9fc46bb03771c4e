"""TGI's own routes: generate, tokenize, info, probes, metrics.

Entry points: `routes.register`, `probes.register`.
May import: api.openai and the dialects over it, server and below.
"""
