"""Every request field of this server and of those it stands in for: what becomes of it.

Entry points: `table.TABLE` (the data), `reading.read_request` (bodies), `page.page` (for the documentation).
May import: api.body.fields, server, request, errors.
"""
