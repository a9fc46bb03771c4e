"""The chat page at `/` and the page of the API at `/docs`.

Entry point: `routes.register`.
May import: api.tgi, server and below.
"""
