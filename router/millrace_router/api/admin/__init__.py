"""Routes of the operator, which need the admin key: loading, unloading and listing adapters.

Entry point: `routes.register`.
Imports: access, adapters, api.body, api.chat, config, errors, server.
"""
