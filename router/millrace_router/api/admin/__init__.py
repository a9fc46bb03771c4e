"""Routes of the operator, which need the admin key: loading, unloading and listing adapters.

Entry point: `routes.register`.
May import: api.openai, server and below.
"""
