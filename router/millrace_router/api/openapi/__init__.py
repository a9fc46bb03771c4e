"""The OpenAPI description of all routes.

Entry points: `document.register`, `operations.OPERATIONS`.
May import: every other room of api, server and below.
"""
