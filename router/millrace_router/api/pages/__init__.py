"""The chat page at `/`, figures of the server at `/status`, and the page of the API at `/docs`.

Entry point: `routes.register`.
Imports: api.tgi, errors, server, telemetry.
"""
