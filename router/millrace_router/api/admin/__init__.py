"""Routes of the operator, which need the admin key: loading, unloading and listing adapters.

Entry point: `routes.register`.
May import: api.chat, api.body, server and below.
"""
