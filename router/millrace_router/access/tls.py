"""TLS of the HTTP port."""

from __future__ import annotations

import ssl

from millrace_router.config import RouterConfig


class ListenerTlsError(Exception):
    """The files of the flags are missing or unusable."""


def listener_tls(config: RouterConfig) -> ssl.SSLContext | None:
    """Return the context of --ssl-certfile, --ssl-keyfile and --ssl-ca-certs; None without them.

    With --ssl-ca-certs a client must present a certificate.

    Raises:
        ListenerTlsError: as above.

    """
    cert, key, ca = config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs
    if cert is None and key is None and ca is None:
        return None
    if cert is None or key is None:
        missing = "--ssl-certfile" if cert is None else "--ssl-keyfile"
        raise ListenerTlsError(f"HTTPS needs {missing} too")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # Without a password function OpenSSL asks the terminal.
        context.load_cert_chain(cert, key, password=lambda: "")
    except OSError as error:
        raise ListenerTlsError(f"{cert} and {key} cannot be used for HTTPS: {error}") from error
    if ca is not None:
        try:
            context.load_verify_locations(ca)
        except OSError as error:
            raise ListenerTlsError(f"{ca} cannot be used for HTTPS: {error}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context
