"""Who may connect: the keys of clients, and TLS of the HTTP port.

Entry points: `keys.ApiKeys`, `tls.listener_tls`.
Imports: config, request.
"""
