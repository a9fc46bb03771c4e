"""The OpenAPI description of all routes.

Entry points: `document.register`, `document.OPERATIONS`.
Imports: api.admin, api.anthropic, api.body, api.chat, api.openai, api.pages, api.platforms, api.pooling,
api.responses, api.tgi, request, server, version.
"""
