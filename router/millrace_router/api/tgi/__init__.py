"""TGI's own routes: generate, tokenize, info, probes, metrics.

Entry points: `routes.register`, `probes.register`.
Imports: api.body, api.chat, api.openai, engine, errors, prediction, request, server, telemetry, text, version.
"""
